package console

import (
	"net/http"

	"github.com/dlqd/dlqd/internal/access"
)

// signingIn is the page on which one signs in.
type signingIn struct {
	Tokens, Provider bool
	To               string // where one wanted to go
	Why              string // why it did not work; "" at first
}

func (c *Console) signIn(w http.ResponseWriter, r *http.Request, status int, why string) {
	in := c.request(r)
	page := signingIn{To: "/", Why: why}
	for _, to := range []string{r.URL.Query().Get("to"), r.PostFormValue("to")} {
		if access.LocalPath(to) {
			page.To = to
		}
	}
	if c.SignInWays != nil {
		page.Tokens, page.Provider = c.SignInWays()
	}
	in.frame.Bare = true
	c.answer(w, in, &view{Template: "signin", Title: "Sign in", Status: status, Data: &page}, nil)
}

// SignInFailed shows the page again, and says why it did not work.
func (c *Console) SignInFailed(w http.ResponseWriter, r *http.Request, status int, why string) {
	c.signIn(w, r, status, why)
}
