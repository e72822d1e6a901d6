-- +goose Up
-- Which failure group the errors of a group are in since the grouping method changed. The length of
-- a fingerprint says which method made it.
CREATE TABLE dlq.group_aliases (
    queue       text NOT NULL,
    former      text NOT NULL,
    fingerprint text NOT NULL CHECK (fingerprint <> former),
    main        boolean NOT NULL,
    entry_id    uuid,
    title       text,
    learned_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    counted_at  timestamptz,
    PRIMARY KEY (queue, former, fingerprint)
);
CREATE UNIQUE INDEX group_aliases_main ON dlq.group_aliases (queue, former) WHERE main;
CREATE INDEX group_aliases_of ON dlq.group_aliases (queue, fingerprint, learned_at);
CREATE INDEX group_aliases_uncounted ON dlq.group_aliases (queue) WHERE counted_at IS NULL;
COMMENT ON TABLE dlq.group_aliases IS 'Failure groups of an earlier grouping method, each with the groups that its errors are in now. Open entries are moved to these; closed entries keep the former fingerprint.';
COMMENT ON COLUMN dlq.group_aliases.queue IS 'The queue.';
COMMENT ON COLUMN dlq.group_aliases.former IS 'Fingerprint by the earlier method.';
COMMENT ON COLUMN dlq.group_aliases.fingerprint IS 'Fingerprint by the present method.';
COMMENT ON COLUMN dlq.group_aliases.main IS 'The group that goes on with the counts of the former one: the first that was learned. Closed entries of the former group are its.';
COMMENT ON COLUMN dlq.group_aliases.entry_id IS 'The entry from which it was learned.';
COMMENT ON COLUMN dlq.group_aliases.title IS 'What that entry''s error says, masked, for the title of the group; null once the rollups took it in.';
COMMENT ON COLUMN dlq.group_aliases.learned_at IS 'When.';
COMMENT ON COLUMN dlq.group_aliases.counted_at IS 'When the rollups took it in; null until then, about a second.';

ALTER TABLE dlq.group_marks ADD COLUMN inherited_from text;
COMMENT ON COLUMN dlq.group_marks.inherited_from IS 'Former fingerprint of the group whose mute, or mark as fixed, this group has. It ends where the two turn out not to be one to one, unless a person has decided since.';

-- +dlqd concurrently
CREATE INDEX dead_letter_open_by_former_method ON dlq.dead_letter_open (fingerprint, id) WHERE length(fingerprint) < 20;

-- +goose Down
DROP INDEX IF EXISTS dlq.dead_letter_open_by_former_method;
ALTER TABLE dlq.group_marks DROP COLUMN inherited_from;
DROP TABLE dlq.group_aliases;
