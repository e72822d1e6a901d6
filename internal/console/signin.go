package console

import (
	"net/http"

	"github.com/dlqd/dlqd/internal/access"
)

// signingIn is the sign-in page.
type signingIn struct {
	Tokens, Provider bool
	To               string // path to return to
	Why              string // why the sign-in failed; "" at first
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

// SignInFailed shows the sign-in page with the reason why it failed.
func (c *Console) SignInFailed(w http.ResponseWriter, r *http.Request, status int, why string) {
	c.signIn(w, r, status, why)
}
