-- What the processes of a gateway show to the server. Only its hash is kept.
ALTER TABLE gateways ADD COLUMN token_hash TEXT;
CREATE UNIQUE INDEX gateways_token_key ON gateways (token_hash) WHERE token_hash IS NOT NULL AND NOT deleted;

-- A proxy that is a process of a gateway says of which one, and where people find it.
ALTER TABLE proxies ADD COLUMN gateway_id TEXT;
ALTER TABLE proxies ADD COLUMN address TEXT;
CREATE INDEX proxies_gateway ON proxies (gateway_id) WHERE gateway_id IS NOT NULL;

-- Names under which gateways publish services. One of a run that is over is free.
CREATE TABLE service_domains (
    domain TEXT NOT NULL,
    run_id TEXT NOT NULL
);
CREATE UNIQUE INDEX service_domains_domain_key ON service_domains (domain);
CREATE INDEX service_domains_run ON service_domains (run_id);
