//! Which handler answers which operation. Handlers find, authorise, do and answer; nothing else.

mod projects;
mod server;
mod users;

use crate::http::Routes;

/// Every handler there is.
pub fn all() -> Routes {
    let routes = Routes::new();
    let routes = server::mount(routes);
    let routes = users::mount(routes);
    projects::mount(routes)
}
