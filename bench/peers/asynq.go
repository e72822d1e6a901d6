// Command peers runs asynq behind net/http. It has the same arguments and output as node/peer.js.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"
	"golang.org/x/sync/errgroup"
)

const concurrency = 100

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	if len(os.Args) != 4 {
		return errors.New("usage: peers asynq SOCKET serve|JOBS")
	}
	redis := asynq.RedisClientOpt{Network: "unix", Addr: os.Args[2], PoolSize: concurrency}
	client := asynq.NewClient(redis)
	defer func() { _ = client.Close() }()
	if os.Args[3] == "serve" {
		return serve(ctx, redis, client)
	}
	jobs, err := strconv.Atoi(os.Args[3])
	if err != nil {
		return err
	}
	return work(ctx, redis, client, jobs)
}

func serve(ctx context.Context, redis asynq.RedisClientOpt, client *asynq.Client) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter,
		r *http.Request,
	) {
		var message struct{ MessageID, Kind string }
		body, err := io.ReadAll(r.Body)
		if err == nil {
			err = json.Unmarshal(body, &message)
		}
		if err == nil {
			_, err = client.EnqueueContext(r.Context(), asynq.NewTask(message.Kind, body), asynq.TaskID(message.MessageID))
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusAccepted)
		_, _ = fmt.Fprintf(w, `{"messageId": %q}`, message.MessageID)
	})}
	go func() { _ = server.Serve(listener) }()
	defer func() { _ = server.Close() }()
	fmt.Printf("%s\n\n", listener.Addr())
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	inspector := asynq.NewInspector(redis)
	defer func() { _ = inspector.Close() }()
	queue, err := inspector.GetQueueInfo("default")
	if err == nil {
		fmt.Println(queue.Size)
	}
	return err
}

func work(ctx context.Context, redis asynq.RedisClientOpt, client *asynq.Client, jobs int) error {
	payload := fmt.Appendf(nil, `{"blob": "%0900d"}`, 0)
	var group errgroup.Group
	group.SetLimit(concurrency)
	for range jobs {
		group.Go(func() error {
			_, err := client.EnqueueContext(ctx, asynq.NewTask("noop", payload))
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	var worked atomic.Int64
	done := make(chan struct{})
	server := asynq.NewServer(redis, asynq.Config{Concurrency: concurrency, LogLevel: asynq.ErrorLevel})
	start := time.Now()
	if err := server.Start(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
		if worked.Add(1) == int64(jobs) {
			close(done)
		}
		return nil
	})); err != nil {
		return err
	}
	<-done
	fmt.Println(float64(jobs) / time.Since(start).Seconds())
	server.Shutdown()
	return nil
}
