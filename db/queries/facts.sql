-- name: Apply :one
SELECT dlq.apply_facts(@most::integer, sqlc.narg('run')::uuid)::integer AS applied;
