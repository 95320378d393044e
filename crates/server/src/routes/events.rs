//! Events.

use windlass_api::{
    events::{Event, ListRequest},
    operations::ListEvents,
};

use crate::{app::App, auth::Caller, error::Result, http::ApiRoutes, services::events};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes.token::<ListEvents, _, _, _>(list)
}

async fn list(app: App, caller: Caller, requested: ListRequest) -> Result<Vec<Event>> {
    events::list(&app, &caller, requested).await
}
