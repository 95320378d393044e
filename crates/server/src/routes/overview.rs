//! Lists, counts, search, plots and the editor of the web UI.

use windlass_api::{
    Document,
    changes::{FeedEvent, StreamRequest},
    configurations::{
        CheckRequest, CheckResult, ErrorPage, ErrorPageRequest, PlanTextRequest, PlanTextResult,
        SchemaRequest,
    },
    dispatchers::DispatcherList,
    explanations::*,
    metrics::{BlockEvent, BlockStreamRequest, SeriesList, SeriesRequest},
    operations::*,
    overview::*,
    rows::*,
    runs::TerminalRequest,
    server::EmptyRequest,
    views::{View, ViewList},
};
use windlass_model::id::InstanceId;

use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    change_feed,
    error::Result,
    http::ApiRoutes,
    services::{
        SseStream, blocks, configurations, explanations, overview,
        queue::dispatchers,
        rows,
        runs::{self, OpenedShell},
        series, views,
    },
};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .token::<ListRunRows, _, _, _>(runs)
        .token::<ListManagedJobRows, _, _, _>(managed_jobs)
        .token::<ListInstanceRows, _, _, _>(instances)
        .token::<ListContainerRows, _, _, _>(containers)
        .token::<ListDispatchers, _, _, _>(list_dispatchers)
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
        .project::<RedeployService, _, _>(redeploy)
        .project_terminal::<OpenTerminal, _, _, _, _>(open_terminal, check_terminal)
        .token::<QueryMetrics, _, _, _>(query_metrics)
        .token_events::<StreamBlocks, _, _>(stream_blocks)
        .token::<ListViews, _, _, _>(list_views)
        .token::<SetView, _, _, _>(set_view)
        .token::<DeleteView, _, _, _>(delete_view)
        .token::<ReadSchema, _, _, _>(schema)
        .token::<ReadErrorPage, _, _, _>(error_page)
        .project::<CheckConfiguration, _, _>(check_configuration)
        .project::<PlanConfiguration, _, _>(plan_configuration)
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

async fn list_dispatchers(app: App, caller: Caller, _: EmptyRequest) -> Result<DispatcherList> {
    dispatchers::list_for(&app, &caller).await
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

async fn redeploy(app: App, scope: ProjectScope, requested: RedeployRequest) -> Result<()> {
    runs::redeploy(&app, &scope, &requested.run_name, requested.num).await
}

async fn open_terminal(app: App, scope: ProjectScope, requested: TerminalRequest) -> Result<OpenedShell> {
    runs::open_terminal(&app, &scope, &requested).await
}

async fn check_terminal(app: App, scope: ProjectScope, requested: TerminalRequest) -> Result<()> {
    runs::check_terminal(&app, &scope, &requested).await
}

async fn query_metrics(app: App, caller: Caller, requested: SeriesRequest) -> Result<SeriesList> {
    series::query(&app, &caller, requested).await
}

async fn stream_blocks(
    app: App,
    caller: Caller,
    requested: BlockStreamRequest,
    _: Option<u64>,
) -> Result<SseStream<BlockEvent>> {
    blocks::stream(&app, &caller, requested).await
}

async fn list_views(app: App, caller: Caller, _: EmptyRequest) -> Result<ViewList> {
    views::list(&app, &caller).await
}

async fn set_view(app: App, caller: Caller, requested: windlass_api::views::SetRequest) -> Result<View> {
    views::set(&app, &caller, requested).await
}

async fn delete_view(app: App, caller: Caller, requested: windlass_api::views::DeleteRequest) -> Result<()> {
    views::delete(&app, &caller, requested).await
}

async fn schema(_: App, _: Caller, requested: SchemaRequest) -> Result<Document> {
    configurations::schema(&requested.name)
}

async fn error_page(_: App, _: Caller, requested: ErrorPageRequest) -> Result<ErrorPage> {
    configurations::error_page(&requested.code)
}

async fn check_configuration(_: App, _: ProjectScope, requested: CheckRequest) -> Result<CheckResult> {
    configurations::check(&requested.text)
}

async fn plan_configuration(
    app: App,
    scope: ProjectScope,
    requested: PlanTextRequest,
) -> Result<PlanTextResult> {
    configurations::plan(&app, &scope, requested).await
}
