package breaker_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/breaker"
)

// closed returns the breakers of a process that has just seen the breaker of bank close.
func (b *bundle) closed() *breaker.Breakers {
	b.Helper()
	p := b.process("one")
	require.NoError(b, p.ForceOpen(b.Context(), bank, "kim", "", 0))
	_, err := p.Reset(b.Context(), bank, "kim", "")
	require.NoError(b, err)
	return p
}

// A destination accepts 50 messages a second. Held messages are released slowly at first, faster while the destination
// accepts all of them, and slower again after the destination has rejected many.
func TestRamp_RisesOnlyWhileTheDestinationAnswers(t *testing.T) {
	t.Parallel()
	const takes = 50
	b := setup(t, "")
	p := b.closed()
	delivered, failed, before, refused := 0, 0, 1, false
	for delivered < 2000 {
		places := p.Places("default", 1000)
		require.LessOrEqual(t, places, 2*before+1)
		if refused {
			require.Less(t, places, before)
		}
		require.False(t, p.Released("default", places, places))
		for i := range places {
			require.True(t, b.deliver(p, i < takes))
		}
		delivered, failed = delivered+min(places, takes), failed+max(places-takes, 0)
		refused = places > takes+takes/5
		before = places
		b.pass(time.Second)
	}
	require.Less(t, failed, delivered/10)
	b.requireState(p, breaker.Closed)

	// A few failures do not slow down the ramp, because they may concern single messages.
	first := p.Places("default", 1000)
	before = first
	for range 20 {
		for i := range before {
			require.True(t, b.deliver(p, i%20 != 0))
		}
		b.pass(time.Second)
		before = p.Places("default", 1000)
	}
	require.Greater(t, before, first)

	// If the breaker opens again, the ramp restarts at its lowest rate.
	require.NoError(t, p.ForceOpen(t.Context(), bank, "kim", "", 0))
	_, err := p.Reset(t.Context(), bank, "kim", "")
	require.NoError(t, err)
	require.LessOrEqual(t, p.Places("default", 1000), 2)

	// Without deliveries, the rate does not rise.
	for range 100 {
		b.pass(time.Second)
		require.LessOrEqual(t, p.Places("default", 1000), 2)
	}
}

// A redelivery that gets no place is held, and later gets a place in turn with the messages that were held before.
// Places are reserved at most a second ahead, so that held messages do not use up the places of all later redeliveries.
func TestRamp_RedeliveriesShareThePlacesOfHeldMessages(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	fresh := b.process("fresh")
	require.True(t, fresh.TakePlace("default"), "no breaker has opened")
	p := b.closed()
	require.True(t, p.TakePlace("default"))
	for range 1000 {
		require.False(t, p.TakePlace("default"))
	}
	b.pass(time.Second)
	require.Positive(t, p.Places("default", 1000))
	require.False(t, p.TakePlace("default"))
	b.pass(2 * time.Second)
	require.True(t, p.TakePlace("default"))

	// Redeliveries get the places that no held message uses.
	b.pass(time.Second)
	places := p.Places("default", 1000)
	require.Positive(t, places)
	require.False(t, p.Released("default", 0, places))
	require.True(t, p.TakePlace("default"))

	// The ramp ends once no message is held and, for rampLinger, no redelivery was refused a place.
	require.False(t, p.Released("default", 0, 1))
	b.pass(time.Minute)
	require.True(t, p.Paces("default"))
	require.True(t, p.Released("default", 0, 1))
	require.False(t, p.Paces("default"))
	for range 1000 {
		require.True(t, p.TakePlace("default"))
	}

	// A process that starts while messages are held starts with a low rate, too.
	require.Equal(t, 1, fresh.Places("default", 1000))
	require.False(t, fresh.Released("default", 1, 1))
	require.True(t, fresh.TakePlace("default"))
	require.False(t, fresh.TakePlace("default"))
}

func TestRamp_StartsOnlyIfMessagesAreHeld(t *testing.T) {
	t.Parallel()
	p := setup(t, "").process("one")
	require.True(t, p.Released("default", 0, 1))
	require.False(t, p.Paces("default"))
	require.False(t, p.Released("default", 1, 1))
	require.True(t, p.Paces("default"))
}

func TestRamp_LastsWhileAllPlacesAreUsed(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	p := b.closed()
	b.pass(time.Minute)
	require.False(t, p.Released("default", 1, 1))
	require.True(t, p.Paces("default"))
}

// However often places are reserved, the rate rises only once a second.
func TestRamp_RisesOnceASecond(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	p := b.closed()
	require.Equal(t, 2, p.Places("default", 1000))
	for range 5 {
		b.pass(100 * time.Millisecond)
		require.True(t, b.deliver(p, true))
		require.Zero(t, p.Places("default", 1000))
	}
	b.pass(1500 * time.Millisecond)
	require.Equal(t, 3, p.Places("default", 1000), "two messages a second, a second ahead")
}
