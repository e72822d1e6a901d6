package grpc

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	reflection "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/dlqd/dlqd/internal/background"
)

const (
	// reflectedFor is how long descriptors from a server are used. A server that replaces the first may have other
	// descriptors.
	reflectedFor = time.Minute
	// maxRounds limits the rounds of requests for descriptors. Each round requests the imports of the previous round's
	// descriptors.
	maxRounds = 20
	// reflectionMethod is the method of both versions of the reflection service.
	reflectionMethod = "ServerReflectionInfo"
)

// reflectionServices are the names of the reflection service. Older servers have only the second one. Both have the
// same messages.
var reflectionServices = []protoreflect.FullName{
	"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
}

// DescriptorError says that descriptors do not define the method, or cannot be used.
type DescriptorError struct{ err error }

// Error implements error.
func (e *DescriptorError) Error() string { return e.err.Error() }

// Unwrap returns the wrapped error.
func (e *DescriptorError) Unwrap() error { return e.err }

// Reflected returns methods as servers describe them, and caches these descriptions.
type Reflected struct {
	mu      sync.Mutex
	methods map[string]reflected // by the method's URL
	flights singleflight.Group
}

type reflected struct {
	method *Method
	until  time.Time
}

// Method returns a target's method. kept is true if the descriptors come from an earlier call. If fresh is set, Method
// does not use such descriptors. Concurrent calls share one request to the server. The error is a [DescriptorError], a
// [StatusError] or a network error.
func (r *Reflected) Method(ctx context.Context, client *http.Client, target *Target,
	fresh bool,
) (method *Method, kept bool, err error) {
	address := target.URL()
	if known := r.known(address); known != nil && !fresh {
		return known, true, nil
	}
	key := address
	if fresh {
		key += " fresh"
	}
	deadline, limited := ctx.Deadline()
	flight := r.flights.DoChan(key, func() (found any, err error) {
		defer func() {
			if p := recover(); p != nil { // descriptors that the library does not expect
				err = &DescriptorError{fmt.Errorf("server reflection at %s: panicked: %v", target.base.Host,
					background.Panicked(p).Value)}
			}
		}()
		if known := r.known(address); known != nil && !fresh {
			return known, nil
		}
		ctx := context.WithoutCancel(ctx)
		if limited {
			var cancel context.CancelFunc
			ctx, cancel = context.WithDeadline(ctx, deadline)
			defer cancel()
		}
		return r.ask(ctx, client, target)
	})
	select {
	case <-ctx.Done():
		return nil, false, ctx.Err()
	case result := <-flight:
		if result.Err != nil {
			return nil, false, result.Err
		}
		return result.Val.(*Method), false, nil //nolint:forcetypeassert // of no other type
	}
}

// known returns the cached method of an address, or nil.
func (r *Reflected) known(address string) *Method {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.methods[address]; time.Now().Before(known.until) {
		return known.method
	}
	return nil
}

// ask requests the descriptors of a method from the server, and caches the method for later calls.
func (r *Reflected) ask(ctx context.Context, client *http.Client, target *Target) (*Method, error) {
	files, err := reflect(ctx, client, target)
	if err != nil {
		return nil, err
	}
	method, err := methodOf(target, files)
	if err != nil {
		return nil, &DescriptorError{fmt.Errorf("server reflection at %s: %w", target.base.Host, err)}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.methods == nil {
		r.methods = map[string]reflected{}
	}
	now := time.Now()
	for other, old := range r.methods { // remove methods of destinations that are gone
		if now.After(old.until) {
			delete(r.methods, other)
		}
	}
	r.methods[target.URL()] = reflected{method, now.Add(reflectedFor)}
	return method, nil
}

// reflect requests the files that define a service from the server.
func reflect(ctx context.Context, client *http.Client, target *Target) ([]*descriptorpb.FileDescriptorProto, error) {
	var files []*descriptorpb.FileDescriptorProto
	total, have, asked := 0, map[string]bool{}, map[string]bool{}
	requests := []*reflection.ServerReflectionRequest{{
		MessageRequest: &reflection.ServerReflectionRequest_FileContainingSymbol{
			FileContainingSymbol: string(target.Service),
		},
	}}
	fail := func(format string, args ...any) error {
		return &DescriptorError{fmt.Errorf("server reflection at "+target.base.Host+": "+format, args...)}
	}
	for range maxRounds {
		answers, err := ask(ctx, client, target, requests)
		if err != nil {
			return nil, err
		}
		for _, raw := range answers {
			var answer reflection.ServerReflectionResponse
			if raw == nil {
				return nil, fail("descriptors are compressed, or larger than %d bytes; set descriptorFile", maxDescriptorBytes)
			}
			if err := proto.Unmarshal(raw, &answer); err != nil {
				return nil, fail("%w", err)
			}
			if problem := answer.GetErrorResponse(); problem != nil {
				return nil, fail("%s (%s)", printable(problem.GetErrorMessage()), target.Service)
			}
			for _, raw := range answer.GetFileDescriptorResponse().GetFileDescriptorProto() {
				file := &descriptorpb.FileDescriptorProto{}
				if err := proto.Unmarshal(raw, file); err != nil {
					return nil, fail("%w", err)
				}
				if total += len(raw); total > maxDescriptorBytes || len(files) >= maxDescriptorFiles {
					return nil, fail("descriptors of more than %d bytes or %d files; set descriptorFile", maxDescriptorBytes,
						maxDescriptorFiles)
				}
				if !have[file.GetName()] {
					have[file.GetName()], files = true, append(files, file)
				}
			}
		}
		if requests = importsOf(files, have, asked); len(requests) == 0 {
			return files, nil
		}
		if len(asked) > maxDescriptorFiles {
			return nil, fail("more than %d imports; set descriptorFile", maxDescriptorFiles)
		}
	}
	return nil, fail("imports are nested deeper than %d files; set descriptorFile", maxRounds)
}

// importsOf returns requests for the imports of files. It omits imports in have or in asked, and adds the requested
// imports to asked.
func importsOf(files []*descriptorpb.FileDescriptorProto, have, asked map[string]bool) (
	requests []*reflection.ServerReflectionRequest,
) {
	for _, file := range files {
		for _, name := range file.GetDependency() {
			if known, err := protoregistry.GlobalFiles.FindFileByPath(name); have[name] || asked[name] ||
				err == nil && known.Package() == wellKnown || len(asked) > maxDescriptorFiles {
				continue
			}
			asked[name] = true
			requests = append(requests, &reflection.ServerReflectionRequest{
				MessageRequest: &reflection.ServerReflectionRequest_FileByFilename{FileByFilename: name},
			})
		}
	}
	return requests
}

// ask sends requests to a server's reflection service and returns the answers. It returns a DescriptorError if the
// server has no reflection.
func ask(ctx context.Context, client *http.Client, target *Target,
	requests []*reflection.ServerReflectionRequest,
) (answers [][]byte, err error) {
	messages := make([][]byte, len(requests))
	for i, request := range requests {
		if messages[i], err = proto.Marshal(request); err != nil {
			return nil, err
		}
	}
	for _, service := range reflectionServices {
		answers, err = invoke(ctx, client, target.url(service, reflectionMethod), maxDescriptorBytes, messages...)
		if status, ok := errors.AsType[*StatusError](err); !ok || status.Name != statusUnimplemented {
			return answers, err
		}
	}
	return nil, &DescriptorError{fmt.Errorf("the server at %s has no reflection: set descriptorFile", target.base.Host)}
}
