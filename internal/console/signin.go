package console

import (
	"net/http"
	"net/url"
	"strings"

	"github.com/dlqd/dlqd/internal/access"
)

// signingIn is the sign-in page.
type signingIn struct {
	Tokens, Provider bool
	To               string     // path to return to
	Origin           string     // address to which the provider sends the browser back
	Elsewhere        bool       // a proxy's header shows that Origin is not the page's origin; the script checks that, too
	Why              string     // why the sign-in failed; "" at first
	Kept             bool       // the input of the refused form is kept, and shown again after the sign-in
	TooLong          url.Values // the input of the refused form, if it is too long to keep
}

func (c *Console) signIn(w http.ResponseWriter, r *http.Request, status int, why string) {
	in := c.request(r)
	page := signingIn{To: "/", Why: why}
	for _, to := range []string{r.URL.Query().Get("to"), r.PostFormValue("to")} {
		if access.LocalPath(to) {
			page.To = to
		}
	}
	if r.Method == http.MethodPost && !strings.HasPrefix(r.URL.Path, "/sign-") { // a form of a page
		page.To = c.pageOf(r)
		if t := typedIn(r); len(t.Fields) > 0 {
			if page.Kept = t.keep(w, r); !page.Kept {
				page.TooLong = t.Fields
			}
		}
	}
	if c.SignInWays != nil {
		page.Tokens, page.Provider = c.SignInWays()
		page.Origin = access.SignInOrigin(r)
		host := r.Header.Get("X-Forwarded-Host")
		page.Elsewhere = host != "" && !strings.EqualFold(host, r.Host)
	}
	in.frame.Bare = true
	c.answer(w, in, &view{Template: "signin", Title: "Sign in", Status: status, Data: &page}, nil)
}

// SignInFailed shows the sign-in page with the reason why it failed, or why the form in the request was refused.
func (c *Console) SignInFailed(w http.ResponseWriter, r *http.Request, status int, why string) {
	c.signIn(w, r, status, why)
}
