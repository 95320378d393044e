-- Which job uses which volume, and where it sees it. The last user of an attachment ends it.
CREATE TABLE volume_holds (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    path TEXT NOT NULL,
    volume_id TEXT NOT NULL REFERENCES volumes (id),
    instance_id TEXT NOT NULL REFERENCES instances (id),
    PRIMARY KEY (job_id, path)
);
CREATE INDEX volume_holds_place ON volume_holds (volume_id, instance_id);

ALTER TABLE volume_attachments ADD COLUMN detach_asked_at BIGINT;
ALTER TABLE volume_attachments ADD COLUMN detach_forced_at BIGINT;
-- The job that waits for the end of the attachment.
ALTER TABLE volume_attachments ADD COLUMN ends_for TEXT;
CREATE INDEX volume_attachments_ends_for ON volume_attachments (ends_for);
