-- name: Apply :one
-- Apply applies facts, starting at page @from_page of the table, and returns how many. pages is the size of the table
-- in pages.
SELECT dlq.apply_facts(@most::integer, sqlc.narg('run')::uuid, format('(%s,0)', @from_page::bigint)::tid,
    @careful::boolean)::integer AS applied,
       (pg_relation_size('dlq.job_facts') / current_setting('block_size')::integer)::bigint AS pages;
