//! Which handler answers which operation. Handlers find, authorise, do and answer; nothing else.

mod events;
mod projects;
mod repos;
mod secrets;
mod server;
mod users;

use crate::http::Routes;

/// Every handler there is.
pub fn all() -> Routes {
    [server::mount, users::mount, projects::mount, secrets::mount, events::mount, repos::mount]
        .into_iter()
        .fold(Routes::new(), |routes, mount| mount(routes))
}
