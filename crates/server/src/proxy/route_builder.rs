//! Builds routes from rows.

use std::collections::HashMap;

use windlass_gateway::route::{
    Balance, Cors, LimitKey, ReplicaRoute, RouteGroup, RouteLimit, ServedModel, Service,
};
use windlass_model::{
    config::{Configuration, job_spec::JobSpec, service, serving, traffic},
    id::{RunId, SubmissionId},
};

use super::replica_target;
use crate::{
    db::{
        DbError,
        documents::{JOB_SPEC, leave_out},
        service_replicas::{self as rows, ReadyReplica},
    },
    parsed_run_spec::ParsedRunSpec,
};

/// Maximum time that a request waits for a replica before the client is asked to retry.
pub(super) const HOLD_TIMEOUT_MS: u64 = 30_000;

/// Cache of parsed specifications, which rarely change.
#[derive(Default)]
pub(super) struct RouteBuilder {
    services: HashMap<RunId, (String, Option<Service>)>,
    ports: HashMap<SubmissionId, Option<u16>>,
}

impl RouteBuilder {
    /// Builds the routes of these rows. A service whose specification cannot be read has no route, and its run shows
    /// why.
    pub(super) fn routes(&mut self, services: &[rows::Service], ready: &[ReadyReplica]) -> Vec<Service> {
        self.services.retain(|run, _| services.iter().any(|service| service.run == *run));
        self.ports.retain(|job, _| ready.iter().any(|replica| replica.id == *job));
        let mut by_run: HashMap<RunId, Vec<&ReadyReplica>> = HashMap::new();
        for replica in ready {
            by_run.entry(replica.run).or_default().push(replica);
        }
        let mut routes = Vec::with_capacity(services.len());
        for row in services {
            let Some(mut route) = self.service(row) else { continue };
            let mut groups: Vec<RouteGroup> = Vec::new();
            for replica in by_run.get(&row.run).into_iter().flatten() {
                let Some(port) = self.port(replica) else { continue };
                let one = ReplicaRoute {
                    id: replica.id.to_string(),
                    target: replica_target(replica.instance, replica.id, port),
                };
                let name = replica.group.as_deref().unwrap_or("0");
                match groups.iter_mut().find(|group| group.name == name) {
                    Some(group) => group.replicas.push(one),
                    None => groups.push(RouteGroup { name: name.to_owned(), replicas: vec![one] }),
                }
            }
            route.groups = groups;
            routes.push(route);
        }
        routes
    }

    fn service(&mut self, row: &rows::Service) -> Option<Service> {
        if let Some((spec, known)) = self.services.get(&row.run)
            && *spec == row.spec
        {
            return known.clone();
        }
        let read = ParsedRunSpec::parse(row.run, &row.name, &row.spec);
        let route = match read.as_ref().map(ParsedRunSpec::configuration) {
            Ok(Configuration::Service(service)) => Some(build_route(row, service)),
            Ok(
                Configuration::Task(_)
                | Configuration::DevEnvironment(_)
                | Configuration::Fleet(_)
                | Configuration::Gateway(_)
                | Configuration::Volume(_),
            ) => None,
            Err(error) => {
                tracing::warn!(run = %row.run, %error, "failed to read the specification of a service");
                None
            }
        };
        self.services.insert(row.run, (row.spec.clone(), route.clone()));
        route
    }

    fn port(&mut self, replica: &ReadyReplica) -> Option<u16> {
        *self.ports.entry(replica.id).or_insert_with(|| {
            let spec: Result<JobSpec, DbError> = JOB_SPEC.decode(replica.id, &replica.job_spec);
            spec.map_or_else(
                |error| {
                    leave_out(&error);
                    None
                },
                |spec| spec.service_port,
            )
        })
    }
}

fn build_route(row: &rows::Service, service: &service::Service) -> Service {
    let limits = service.rate_limits.iter().map(|limit| RouteLimit {
        prefix: limit.prefix.0.clone(),
        key: match &limit.key {
            traffic::LimitKey::IpAddress => LimitKey::IpAddress,
            traffic::LimitKey::Header { header } => LimitKey::Header { header: header.clone() },
        },
        rps: limit.rps.0,
        burst: u64::try_from(limit.burst.get()).unwrap_or_default(),
    });
    let model = match &service.model {
        Some(traffic::Model::OpenAi { name, prefix, .. }) => Some(ServedModel {
            name: name.clone(),
            prefix: prefix.clone(),
            created: row.submitted_at.since(windlass_model::time::Timestamp(0)).as_secs(),
        }),
        Some(traffic::Model::Tgi { .. }) | None => None,
    };
    let cors = service.cors.as_ref().map(|cors| Cors {
        origins: cors.origins.iter().map(|origin| origin.0.clone()).collect(),
        credentials: cors.credentials,
        max_age_s: u32::try_from(cors.max_age.0).unwrap_or(u32::MAX),
    });
    Service {
        balance: match service.balance {
            Some(serving::Balance::LeastOutstanding) => Balance::LeastOutstanding,
            Some(serving::Balance::RoundRobin) | None => Balance::RoundRobin,
        },
        at_once: service.max_concurrency.and_then(|max| u32::try_from(max.get()).ok()),
        cors,
        auth: service.auth,
        strip_prefix: service.strip_prefix,
        limits: limits.collect(),
        model,
        hold_ms: HOLD_TIMEOUT_MS,
        ..Service::new(row.project.as_str(), row.name.as_str())
    }
}
