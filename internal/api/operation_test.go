package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/approval"
)

// EchoName is embedded in echoInput, as a part that several inputs share.
type EchoName struct {
	Name string `path:"name"`
}

type echoInput struct {
	EchoName

	Text  string   `query:"text"`
	Words []string `query:"words"`
	Limit int      `query:"limit" default:"50"`
	All   bool     `query:"all"`
	Body  *api.Action
}

// The API receives exactly the input from which the request was made.
func TestOperation_SendsItsInput(t *testing.T) {
	t.Parallel()
	echo := api.Operation[echoInput, echoInput]{ID: "echo", Method: http.MethodPost, Path: "/echo/{name}"}
	mux, got := http.NewServeMux(), make(chan echoInput, 1)
	huma.Register(humago.New(mux, huma.DefaultConfig("test", "1")), huma.Operation{
		OperationID: echo.ID, Method: echo.Method, Path: echo.Path,
	}, func(_ context.Context, in *echoInput) (*struct{}, error) {
		got <- *in
		return &struct{}{}, nil
	})
	for _, c := range []struct{ sent, arrives echoInput }{
		{echoInput{EchoName: EchoName{"a"}}, echoInput{EchoName: EchoName{"a"}, Limit: 50}},
		{
			echoInput{
				EchoName: EchoName{"a/b ?#%ä.."}, Text: "x&y=z +%", Words: []string{"a", "b"}, Limit: 7, All: true,
				Body: &api.Action{Note: "<n>"},
			},
			echoInput{
				EchoName: EchoName{"a/b ?#%ä.."}, Text: "x&y=z +%", Words: []string{"a", "b"}, Limit: 7, All: true,
				Body: &api.Action{Note: "<n>"},
			},
		},
	} {
		r, err := echo.Request(&c.sent)
		require.NoError(t, err)
		request := httptest.NewRequest(r.Method, r.Path, nil)
		if r.Body != nil {
			request = httptest.NewRequest(r.Method, r.Path, bytes.NewReader(r.Body))
			request.Header.Set("Content-Type", "application/json")
		}
		answer := httptest.NewRecorder()
		mux.ServeHTTP(answer, request)
		require.Less(t, answer.Code, 300, answer.Body)
		require.Equal(t, c.arrives, <-got)
	}
	for _, name := range []string{"", ".", ".."} { // with such a name, the path would name another operation
		_, err := echo.Request(&echoInput{EchoName: EchoName{name}})
		require.ErrorContains(t, err, "a name must not be empty")
	}
}

func TestOperation_SendsPayloadsAsTyped(t *testing.T) {
	t.Parallel()
	const typed = "{ \"b\" : 1.0,\n\"a\":[1E3 ,\"<&>\"]}"
	for _, note := range []string{"", "n"} {
		r, err := api.ReplayEntry.Request(&api.ReplayEntryInput{
			EntryInput: api.EntryInput{ID: uuid.NewString()},
			Body:       &api.ReplayAction{Action: api.Action{Note: note}, Payload: json.RawMessage(typed)},
		})
		require.NoError(t, err)
		require.Contains(t, string(r.Body), typed)
		require.True(t, json.Valid(r.Body), string(r.Body))
	}
	raw, err := (&api.Submission{Queue: "default", Kind: "k", Payload: json.RawMessage(typed)}).Encode()
	require.NoError(t, err)
	require.JSONEq(t, `{"queue":"default","kind":"k","payload":`+typed+`}`, string(raw))
	require.Contains(t, string(raw), typed)
}

func TestOperation_ReturnsErrorsOfTheAPI(t *testing.T) {
	t.Parallel()
	of := func(status int, location, body string) error {
		_, err := api.Bulk.Answer(status, http.Header{"Location": {location}}, []byte(body))
		return err
	}
	require.NoError(t, of(http.StatusOK, "", `{"chosen": 1}`))
	var problem *api.Problem
	require.ErrorAs(t, of(http.StatusConflict, "", `{"status": 409, "detail": "no"}`), &problem)
	require.Equal(t, http.StatusConflict, problem.Status)
	require.EqualError(t, of(http.StatusBadGateway, "", "<html>"), "the API answered 502 Bad Gateway")
	require.EqualError(t, of(http.StatusServiceUnavailable, "", `{"message": "no healthy upstream"}`),
		"the API answered 503 Service Unavailable", "a proxy's answer is no success")
	require.ErrorContains(t, of(http.StatusOK, "", "<html>"), "is not one of dlqd's API")
	var requested *api.ApprovalRequestedError
	id := uuid.New()
	body, err := json.Marshal(api.Asked{Approval: &approval.Approval{ID: id}})
	require.NoError(t, err)
	require.ErrorAs(t, of(http.StatusAccepted, api.ApprovalsPath+"/"+id.String(), string(body)), &requested)
	require.Equal(t, id, requested.Approval.ID)
	require.ErrorContains(t, of(http.StatusAccepted, api.ApprovalsPath+"/"+id.String(), `{}`), "names no request")

	health, err := api.GetHealth.Answer(http.StatusServiceUnavailable, nil,
		[]byte(`{"ok": false, "parts": [{"name": "a"}]}`))
	require.NoError(t, err, "health is an answer, too, while a part fails")
	require.Len(t, health.Parts, 1)
}
