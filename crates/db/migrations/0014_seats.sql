-- Placement reads who sits where, of all jobs of a project at once: everything it needs is in the index.
DROP INDEX jobs_project_active;
CREATE INDEX jobs_seats ON jobs (project_id, instance_id, id, blocks, run_deadline_at) WHERE NOT finished AND instance_id IS NOT NULL;
