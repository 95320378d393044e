//! Lists, counts and search of the web UI.

use windlass_api::{
    changes::{FeedEvent, StreamRequest},
    explanations::*,
    operations::*,
    overview::*,
    rows::*,
    server::EmptyRequest,
};
use windlass_model::id::InstanceId;

use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    change_feed,
    error::Result,
    http::ApiRoutes,
    services::{SseStream, explanations, overview, rows},
};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .token::<ListRunRows, _, _, _>(runs)
        .token::<ListManagedJobRows, _, _, _>(managed_jobs)
        .token::<ListInstanceRows, _, _, _>(instances)
        .token::<ListContainerRows, _, _, _>(containers)
        .token::<ReadSummary, _, _, _>(summary)
        .token::<SearchNames, _, _, _>(search)
        .token_events::<StreamChanges, _, _>(changes)
        .token::<ListQueue, _, _, _>(queue)
        .project::<ExplainRun, _, _>(explain_run)
        .project::<ExplainManagedJob, _, _>(explain_managed_job)
        .project::<ExplainInstance, _, _>(explain_instance)
        .project::<ReadTimeline, _, _>(timeline)
        .project::<CompareVariants, _, _>(what_if)
        .project::<ListDeployments, _, _>(deployments)
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

async fn changes(
    app: App,
    caller: Caller,
    requested: StreamRequest,
    last: Option<u64>,
) -> Result<SseStream<FeedEvent>> {
    change_feed::stream(&app, &caller, requested, last).await
}

async fn queue(app: App, caller: Caller, _: EmptyRequest) -> Result<QueueList> {
    explanations::queue(&app, &caller).await
}

async fn explain_run(app: App, scope: ProjectScope, requested: RunRequest) -> Result<Explanation> {
    explanations::explain_run(&app, &scope, requested).await
}

async fn explain_managed_job(
    app: App,
    scope: ProjectScope,
    requested: ManagedJobRequest,
) -> Result<Explanation> {
    explanations::explain_managed_job(&app, &scope, requested.job_id).await
}

async fn explain_instance(app: App, scope: ProjectScope, requested: InstanceRequest) -> Result<Explanation> {
    explanations::explain_instance(&app, &scope, InstanceId(requested.id)).await
}

async fn timeline(app: App, scope: ProjectScope, requested: TimelineRequest) -> Result<Timeline> {
    explanations::timeline(&app, &scope, requested).await
}

async fn what_if(app: App, scope: ProjectScope, requested: WhatIfRequest) -> Result<WhatIfResult> {
    explanations::what_if(&app, &scope, requested).await
}

async fn deployments(app: App, scope: ProjectScope, requested: DeploymentRequest) -> Result<DeploymentList> {
    explanations::deployments(&app, &scope, requested).await
}
