-- Named filters of lists. A view without a project is shown to its user only.
CREATE TABLE saved_views (
    id TEXT PRIMARY KEY,
    user_id TEXT NOT NULL REFERENCES users (id),
    project_id TEXT REFERENCES projects (id),
    page TEXT NOT NULL,
    name TEXT NOT NULL,
    query TEXT NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX saved_views_key ON saved_views (user_id, page, name, coalesce(project_id, ''));
CREATE INDEX saved_views_project ON saved_views (project_id) WHERE project_id IS NOT NULL;

-- Requests to services in steps of a minute, kept longer than the counts from which they are made.
CREATE TABLE service_minutes (
    run_id TEXT NOT NULL,
    at BIGINT NOT NULL,
    requests BIGINT NOT NULL,
    in_flight_us BIGINT NOT NULL,
    waiting_us BIGINT NOT NULL,
    PRIMARY KEY (run_id, at)
);
CREATE INDEX service_minutes_at ON service_minutes (at);

-- Jobs that ran on an instance.
CREATE INDEX jobs_past_instance ON jobs (instance_id, finished_at) WHERE finished AND instance_id IS NOT NULL;

-- Deployments of services: what was applied, by whom, and when.
CREATE TABLE deployments (
    run_id TEXT NOT NULL REFERENCES runs (id),
    num BIGINT NOT NULL,
    at BIGINT NOT NULL,
    user_id TEXT REFERENCES users (id),
    spec TEXT NOT NULL,
    PRIMARY KEY (run_id, num)
);
