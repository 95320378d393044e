//! Tests of the server against real databases and over HTTP.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod agents_enrolment;
mod agents_events;
mod agents_host;
mod agents_hostile;
mod agents_http;
mod agents_many;
mod agents_ssh;
mod api_fields;
mod auth_matrix;
mod db;
mod db_durability;
mod db_fixtures;
mod db_leases;
mod db_replicas;
mod db_runs;
mod db_services;
mod db_tables;
mod db_units;
mod dstack_wire;
mod fake_s3;
mod fleets;
mod http;
mod http_client;
mod http_connect;
mod http_costs;
mod http_errors;
mod http_fleets;
mod http_fuzz;
mod http_gateways;
mod http_images;
mod http_limits;
mod http_projects;
mod http_queue;
mod http_queue_fuzz;
mod http_queue_race;
mod http_queue_rights;
mod http_runs;
mod http_secrets;
mod http_tls;
mod http_users;
mod job_dispatch;
mod job_ends;
mod job_metrics;
mod job_processes;
mod job_test_env;
mod log_copy;
mod log_stores;
mod log_stream;
mod logs;
mod managed_jobs;
mod openapi;
mod pipelines;
mod postgres;
mod postgres_tls;
mod real_s3;
mod retention;
mod scripted_hosts;
#[path = "../../../tunnel/tests/it/sshd.rs"]
#[expect(dead_code, reason = "the tests of the tunnel use more of it")]
mod sshd;
mod stream_rights;
mod volumes;
mod waiting_jobs;
