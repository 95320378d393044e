//! Lists, counts and search of the web UI.

use windlass_api::{operations::*, overview::*, rows::*};

use crate::{
    app::App,
    auth::Caller,
    error::Result,
    http::ApiRoutes,
    services::{overview, rows},
};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .token::<ListRunRows, _, _, _>(runs)
        .token::<ListManagedJobRows, _, _, _>(managed_jobs)
        .token::<ListInstanceRows, _, _, _>(instances)
        .token::<ListContainerRows, _, _, _>(containers)
        .token::<ReadSummary, _, _, _>(summary)
        .token::<SearchNames, _, _, _>(search)
}

async fn runs(app: App, caller: Caller, requested: RowsRequest) -> Result<Rows<RunRow>> {
    rows::runs(&app, &caller, requested).await
}

async fn managed_jobs(app: App, caller: Caller, requested: RowsRequest) -> Result<Rows<ManagedJobRow>> {
    rows::managed_jobs(&app, &caller, requested).await
}

async fn instances(app: App, caller: Caller, requested: RowsRequest) -> Result<Rows<InstanceRow>> {
    rows::instances(&app, &caller, requested).await
}

async fn containers(app: App, caller: Caller, requested: RowsRequest) -> Result<Rows<ContainerRow>> {
    rows::containers(&app, &caller, requested).await
}

async fn summary(app: App, caller: Caller, requested: SummaryRequest) -> Result<Summary> {
    overview::summary(&app, &caller, &requested, true).await
}

async fn search(app: App, caller: Caller, requested: SearchRequest) -> Result<SearchResult> {
    overview::search(&app, &caller, &requested).await
}
