//! Handlers of operations. Handlers look up, authorise, call a service and respond; nothing else.

pub(crate) mod arvados;
mod budgets;
mod costs;
mod events;
mod exports;
mod fleets;
mod gateways;
mod instances;
mod managed_jobs;
mod observability;
mod overview;
mod projects;
mod quotas;
mod repos;
mod runs;
mod secrets;
mod server;
mod sessions;
mod users;
mod volumes;

use crate::http::ApiRoutes;

/// All handlers.
pub fn all_routes() -> ApiRoutes {
    [
        budgets::mount,
        costs::mount,
        events::mount,
        fleets::mount,
        gateways::mount,
        instances::mount,
        managed_jobs::mount,
        projects::mount,
        repos::mount,
        runs::mount,
        secrets::mount,
        server::mount,
        sessions::mount,
        users::mount,
        volumes::mount,
        observability::mount,
        exports::mount,
        quotas::mount,
        overview::mount,
    ]
    .into_iter()
    .fold(ApiRoutes::new(), |routes, mount| mount(routes))
}
