-- name: Position :one
SELECT next_offset FROM dlq.source_positions
WHERE cluster = @cluster AND topic_id = @topic_id AND partition = @partition;

-- name: Append :one
-- Append stores a batch. next is -1 if there is no position.
SELECT a.accepted::boolean AS accepted, coalesce(a.next, -1)::bigint AS next, a.entries::integer AS entries,
    a.returned::integer AS returned, a.skipped::integer AS skipped
FROM dlq.store_records(@source::text, @queue::text, @cluster::text, @topic::text, @topic_id::uuid,
    @partition::integer, @first_offset::bigint, @next_offset::bigint, @is_start::boolean, @is_lost::boolean,
    @is_ordered::boolean, @offsets::bigint[], @ats::timestamptz[], @failed_ats::timestamptz[], @delivery_ids::text[],
    @kinds::text[], @ordering_keys::text[], @events::jsonb[], @errors::text[], @histories::jsonb[],
    @attempts::integer[], @metadata::jsonb[], @groups::text[], @nodes::text[], @original_topics::text[],
    @original_topic_ids::text[], @original_partitions::integer[], @original_offsets::bigint[], @forms::text[],
    @sizes::bigint[], @sha256s::bytea[], @contents::bytea[], @header_keys::text[], @header_values::text[],
    @keys::bytea[], @values::bytea[]) a;

-- name: ReportProgress :exec
SELECT dlq.report_progress(@source::text, @cluster::text, @queue::text, @topics::text[], @partitions::integer[],
    @states::text[], @nexts::bigint[], @ends::bigint[], @errors::text[], @starts::bigint[]);

-- name: ListPartitions :many
-- ListPartitions returns the partitions of sources in the caller's scope, with the reports of their readers and their
-- positions. A source without a report has one row without a topic. An unknown offset is -1, and an unknown time the
-- epoch.
SELECT n.name AS source, coalesce(p.cluster, n.cluster)::text AS cluster, coalesce(p.topic, '')::text AS topic,
    coalesce(p.partition, -1)::integer AS partition, coalesce(p.queue, n.queue)::text AS queue,
    (CASE WHEN n.removed_at IS NOT NULL THEN 'removed' WHEN n.paused_at IS NOT NULL THEN 'paused'
        WHEN n.seen_at IS NULL OR n.seen_at < now() - interval '1 minute' OR p.state IS NULL THEN 'waiting'
        ELSE p.state END)::text AS state,
    coalesce(p.next_offset, -1)::bigint AS next_offset, coalesce(p.end_offset, -1)::bigint AS end_offset,
    coalesce(p.start_offset, -1)::bigint AS start_offset,
    coalesce(dlq.masked_text(p.error, (SELECT dlq.mask())), '')::text AS error,
    coalesce(p.error_at, 'epoch')::timestamptz AS error_at, coalesce(p.at, n.published_at)::timestamptz AS at,
    coalesce(s.updated_at, 'epoch')::timestamptz AS moved_at, coalesce(s.records, 0)::bigint AS records,
    coalesce(s.holes, 0)::bigint AS holes, coalesce(s.lost, 0)::bigint AS lost
FROM dlq.sources n
LEFT JOIN dlq.source_progress p ON p.source = n.name
LEFT JOIN LATERAL (SELECT l.* FROM dlq.source_positions l WHERE l.cluster = p.cluster AND l.topic = p.topic
    AND l.partition = p.partition AND l.source = p.source ORDER BY l.started_at DESC LIMIT 1) s ON true
WHERE dlq.in_patterns(n.queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))
  AND (@source::text = '' OR n.name = @source::text)
ORDER BY n.name, p.topic, p.partition;

-- name: ListSources :many
-- ListSources returns the sources in the caller's scope. An unknown time is the epoch.
SELECT n.name, n.cluster, n.queue, (n.paused_at IS NOT NULL)::boolean AS paused,
    (n.removed_at IS NOT NULL)::boolean AS removed, f.partitions::bigint AS partitions, f.failing::bigint AS failing,
    f.lag::bigint AS lag, f.records::bigint AS records, f.holes::bigint AS holes, f.lost::bigint AS lost,
    coalesce(dlq.masked_text(f.error, (SELECT dlq.mask())), '')::text AS error,
    coalesce(n.paused_at, 'epoch')::timestamptz AS paused_at, coalesce(n.paused_by, '')::text AS paused_by,
    coalesce(f.moved_at, 'epoch')::timestamptz AS moved_at,
    f.running::boolean AS running
FROM dlq.source_figures() f JOIN dlq.sources n ON n.name = f.source
WHERE dlq.in_patterns(n.queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))
ORDER BY n.name;

-- name: PublishSources :exec
SELECT dlq.publish_sources(@names::text[], @clusters::text[], @queues::text[]);

-- name: SeeSources :many
SELECT s.name::text AS name, s.paused::boolean AS paused, s.changes::bigint AS changes
FROM dlq.see_sources(@names::text[]) s;

-- name: PauseSource :one
SELECT dlq.pause_source(@source::text, @actor::text, nullif(@note::text, ''))::boolean AS changed
FROM (SELECT set_config('dlq.origin', @origin::text, true) OFFSET 0) o;

-- name: ResumeSource :one
SELECT dlq.resume_source(@source::text, @actor::text, nullif(@note::text, ''))::boolean AS changed
FROM (SELECT set_config('dlq.origin', @origin::text, true) OFFSET 0) o;

-- name: RewindSource :one
SELECT r.before::bigint AS before, r.next::bigint AS next
FROM (SELECT set_config('dlq.origin', @origin::text, true) AS origin OFFSET 0) o
CROSS JOIN LATERAL dlq.rewind_source(@source::text, @topic::text, @partition::integer, @to_offset::bigint,
    @is_skip::boolean, @actor::text, nullif(@note::text || left(o.origin, 0), '')) r;

-- name: TakeDuty :one
-- TakeDuty reserves one of two tasks (the check of consumer groups, or the feeds) for one process for a time, or
-- extends the process's reservation.
SELECT dlq.take_duty(@name::text, @holder::uuid, @during::interval)::boolean AS taken;

-- name: EndDuty :exec
SELECT dlq.end_duty(@name::text, @holder::uuid);

-- name: UnreadGroups :many
SELECT g.cluster::text AS cluster, g.consumer_group::text AS consumer_group FROM dlq.unread_groups() g;

-- name: MarkRead :one
SELECT dlq.mark_read(@cluster::text, @consumer_group::text, @topics::text[], @partitions::integer[],
    @offsets::bigint[])::integer AS marked;

-- name: ResolveReturned :one
SELECT dlq.resolve_returned(@queue::text, @quiet::interval, @returned_for::interval)::integer AS resolved;

-- name: PublishFeeds :exec
SELECT dlq.publish_feeds(@names::text[], @clusters::text[], @topics::text[]);

-- name: CollectFeed :one
SELECT dlq.collect_feed(@feed::text, @queues::text[], @most::integer)::integer AS collected;

-- name: FeedTopics :many
-- FeedTopics returns the topics with records to publish. For a paused feed it returns none.
SELECT t.topic::text AS topic FROM dlq.feed_topics(@feed::text) t WHERE NOT dlq.is_feed_paused(@feed::text);

-- name: FeedBatch :many
SELECT b.id::uuid AS id, b.entry_id::uuid AS entry_id, coalesce(b.ordering_key, '')::text AS ordering_key,
    coalesce(b.hidden_key, '')::text AS hidden_key
FROM dlq.feed_batch(@feed::text, @topic::text, @most::integer) b;

-- name: MarkFeed :exec
SELECT dlq.mark_feed(@feed::text, @ids::uuid[], @partitions::integer[], @offsets::bigint[], @failures::text[]);

-- name: ReportFeed :exec
SELECT dlq.report_feed(@feed::text, @error::text);

-- name: ListFeeds :many
-- ListFeeds returns no row if the caller's scope does not have all queues. An unknown time is the epoch.
SELECT f.feed::text AS feed, f.cluster::text AS cluster, f.topic::text AS topic, f.published::bigint AS published,
    f.failed::bigint AS failed, f.waiting::bigint AS waiting,
    coalesce(f.waiting_since, 'epoch')::timestamptz AS waiting_since, coalesce(f.error, '')::text AS error,
    coalesce(f.error_at, 'epoch')::timestamptz AS error_at, f.running::boolean AS running,
    coalesce(f.paused_at, 'epoch')::timestamptz AS paused_at, coalesce(f.paused_by, '')::text AS paused_by
FROM dlq.feed_figures() f WHERE (SELECT dlq.scope()) IS NULL ORDER BY f.feed;

-- name: PauseFeed :one
SELECT dlq.pause_feed(@feed::text, @actor::text, nullif(@note::text, ''))::boolean AS changed
FROM (SELECT set_config('dlq.origin', @origin::text, true) OFFSET 0) o;

-- name: ResumeFeed :one
SELECT dlq.resume_feed(@feed::text, @actor::text, nullif(@note::text, ''))::boolean AS changed
FROM (SELECT set_config('dlq.origin', @origin::text, true) OFFSET 0) o;

-- name: RewindFeed :one
SELECT dlq.rewind_feed(@feed::text, @since::timestamptz, @actor::text, nullif(@note::text, ''))::bigint AS records
FROM (SELECT set_config('dlq.origin', @origin::text, true) OFFSET 0) o;

-- name: PublishedTo :many
-- PublishedTo returns the records that feeds publish for an entry. Until the broker has acknowledged a record, its
-- offset is -1.
SELECT r.feed, r.cluster, r.topic, coalesce(r.partition, -1)::integer AS partition,
    coalesce(r."offset", -1)::bigint AS at_offset, coalesce(r.acknowledged_at, 'epoch')::timestamptz AS acknowledged_at,
    coalesce(r.failure, '')::text AS failure
FROM dlq.feed_records r WHERE r.entry_id = @entry ORDER BY r.feed;
