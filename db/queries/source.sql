-- name: Position :one
SELECT next_offset FROM dlq.source_positions
WHERE cluster = @cluster AND topic_id = @topic_id AND partition = @partition;

-- name: Append :one
-- Append stores a batch. Next is -1 if there is no position.
SELECT a.accepted::boolean AS accepted, coalesce(a.next, -1)::bigint AS next, a.entries::integer AS entries,
    a.returned::integer AS returned, a.skipped::integer AS skipped
FROM dlq.append_records(@source::text, @queue::text, @cluster::text, @topic::text, @topic_id::uuid,
    @partition::integer, @first_offset::bigint, @next_offset::bigint, @is_start::boolean, @is_lost::boolean,
    @is_ordered::boolean, @records::jsonb[], @keys::bytea[], @values::bytea[]) a;

-- name: ReportProgress :exec
SELECT dlq.report_progress(@source::text, @cluster::text, @queue::text, @topics::text[], @partitions::integer[],
    @states::text[], @nexts::bigint[], @ends::bigint[], @errors::text[]);

-- name: ListPartitions :many
-- ListPartitions returns the partitions of sources in the caller's scope: what their readers reported, and the ledger.
-- An offset that is not known is -1, a time the epoch.
SELECT p.source, p.cluster, p.topic, p.partition, p.queue, p.state, coalesce(p.next_offset, -1)::bigint AS next_offset,
    coalesce(p.end_offset, -1)::bigint AS end_offset,
    coalesce(dlq.masked_text(p.error, (SELECT dlq.mask())), '')::text AS error,
    coalesce(p.error_at, 'epoch')::timestamptz AS error_at, p.at,
    coalesce(s.next_offset - s.first_offset - s.holes - s.lost, 0)::bigint AS records,
    coalesce(s.holes, 0)::bigint AS holes, coalesce(s.lost, 0)::bigint AS lost
FROM dlq.source_progress p
LEFT JOIN LATERAL (SELECT l.* FROM dlq.source_positions l WHERE l.cluster = p.cluster AND l.topic = p.topic
    AND l.partition = p.partition AND l.source = p.source ORDER BY l.started_at DESC LIMIT 1) s ON true
WHERE dlq.in_patterns(p.queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))
ORDER BY p.source, p.topic, p.partition;
