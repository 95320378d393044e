-- What ended in a period is what it cost; jobs that go on have an index already.
CREATE INDEX jobs_ended ON jobs (project_id, finished_at) WHERE finished;
