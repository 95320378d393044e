-- Where a host stands on its way, in a sentence for people.
ALTER TABLE instances ADD COLUMN status_message TEXT;
-- The submission that asked for it, for one that no fleet's minimum asked for.
ALTER TABLE instances ADD COLUMN made_for TEXT;
-- Why its end was asked for, beside `termination_asked_at`; none: a user wants it.
ALTER TABLE instances ADD COLUMN end_reason TEXT;
