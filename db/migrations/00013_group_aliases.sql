-- +goose Up
-- Maps failure groups of an earlier grouping method to the groups that their errors are in now. The
-- length of a fingerprint tells which method made it.
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
COMMENT ON TABLE dlq.group_aliases IS
    'Failure groups of an earlier grouping method, each with the groups that its errors are in now. Open '
    'entries are moved to these; closed entries keep the former fingerprint.';
COMMENT ON COLUMN dlq.group_aliases.queue IS 'The queue.';
COMMENT ON COLUMN dlq.group_aliases.former IS 'Fingerprint by the earlier method.';
COMMENT ON COLUMN dlq.group_aliases.fingerprint IS 'Fingerprint by the current method.';
COMMENT ON COLUMN dlq.group_aliases.main IS
    'Whether this is the first group that was found for the former one. If so, it continues the counts of the '
    'former group and shows its closed entries.';
COMMENT ON COLUMN dlq.group_aliases.entry_id IS 'The entry whose error is in both groups.';
COMMENT ON COLUMN dlq.group_aliases.title IS
    'The masked error text of that entry, for the title of the group; null once the rollups have counted the '
    'alias.';
COMMENT ON COLUMN dlq.group_aliases.learned_at IS 'When the alias was found.';
COMMENT ON COLUMN dlq.group_aliases.counted_at IS
    'When the rollups counted the alias; null until then, for about a second.';

ALTER TABLE dlq.group_marks ADD COLUMN inherited_from text;
COMMENT ON COLUMN dlq.group_marks.inherited_from IS
    'Fingerprint of the former group from which this group inherited its mute or its mark as fixed. The '
    'inheritance ends if the two groups turn out not to be one to one, unless an operator has changed the marks '
    'since.';

-- +dlqd concurrently
CREATE INDEX dead_letter_open_by_former_method ON dlq.dead_letter_open (fingerprint, id) WHERE length(fingerprint) < 20;

-- +goose Down
DROP INDEX IF EXISTS dlq.dead_letter_open_by_former_method;
ALTER TABLE dlq.group_marks DROP COLUMN inherited_from;
DROP TABLE dlq.group_aliases;
