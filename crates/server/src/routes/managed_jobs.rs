//! Managed jobs.

use windlass_api::{managed_jobs::*, operations::*};

use crate::{app::App, auth::ProjectScope, error::Result, http::ApiRoutes, services::managed_jobs};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .project::<LaunchManagedJobs, _, _>(launch)
        .project::<CheckManagedJobs, _, _>(check)
        .project::<ListManagedJobs, _, _>(list)
        .project::<ReadManagedJob, _, _>(read)
        .project::<ReadSavings, _, _>(savings)
        .project::<CancelManagedJobs, _, _>(cancel)
        .project::<ResumeManagedJob, _, _>(resume)
}

async fn launch(app: App, scope: ProjectScope, requested: LaunchRequest) -> Result<LaunchResponse> {
    managed_jobs::launch(&app, &scope, requested).await
}

async fn check(app: App, scope: ProjectScope, requested: LaunchRequest) -> Result<LaunchResponse> {
    managed_jobs::check_only(&app, &scope, requested).await
}

async fn list(app: App, scope: ProjectScope, requested: ListRequest) -> Result<Vec<ManagedJob>> {
    managed_jobs::list(&app, &scope, requested).await
}

async fn read(app: App, scope: ProjectScope, requested: ReadRequest) -> Result<ManagedJob> {
    managed_jobs::read_one(&app, &scope, requested.job_id).await
}

async fn savings(app: App, scope: ProjectScope, requested: ReadRequest) -> Result<Savings> {
    managed_jobs::savings(&app, &scope, requested.job_id).await
}

async fn cancel(app: App, scope: ProjectScope, requested: CancelRequest) -> Result<CancelResponse> {
    managed_jobs::cancel(&app, &scope, requested).await
}

async fn resume(app: App, scope: ProjectScope, requested: ResumeRequest) -> Result<ManagedJob> {
    managed_jobs::resume(&app, &scope, &requested).await
}
