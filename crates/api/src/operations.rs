//! Operation table.
//!
//! A new endpoint starts here: a line, its two types, a handler. `docs/api/missing.md` lists the operations that other
//! servers of this API answer and this one does not, with the reasons.

use crate::{
    Document, auth, backends, budgets, changes, configurations, costs, dispatchers, events, explanations,
    exports, files, fleets, gateways, gpus, instances, logs, managed_jobs, metrics, operation::operations,
    overview, projects, quotas, repos, rows, runs, secrets, server, session, templates, usage, users, views,
    volumes,
};

operations! {
    /// Reports that the server is running.
    CheckHealth = "check_health": Get Query "/healthcheck" Open (server::EmptyRequest) -> server::Health;
    /// Returns counters and gauges of the server, for Prometheus.
    ReadMetrics = "read_metrics": Get Text "/metrics" GlobalAdmin (server::EmptyRequest) -> String;
    /// Returns the version of the API.
    ReadServerInfo = "read_server_info": Post Json "/api/server/get_info" Open (server::EmptyRequest) -> server::Info;
    /// Returns the state of each pipeline of the server replica that answers.
    ListPipelines = "list_pipelines": Post Json "/api/server/pipelines" GlobalAdmin (server::EmptyRequest) -> Vec<server::Pipeline>;

    /// Returns the settings of the server replica that answers, without secrets.
    ListSettings = "list_settings": Post Json "/api/server/settings" GlobalAdmin (server::EmptyRequest) -> server::SettingList;
    /// Returns the JSON Schema of a file format.
    ReadSchema = "read_schema": Post Json "/api/schemas/get" Token (configurations::SchemaRequest) -> Document;
    /// Returns the page about an error code.
    ReadErrorPage = "read_error_page": Post Json "/api/errors/get" Token (configurations::ErrorPageRequest) -> configurations::ErrorPage;

    /// Lists the login methods other than a token.
    ListAuthProviders = "list_auth_providers": Post Json "/api/auth/list_providers" Open (server::EmptyRequest) -> Vec<auth::Provider>;
    /// Returns the next redirect of a browser login.
    ReadNextRedirect = "read_next_redirect": Post Json "/api/auth/get_next_redirect" Open (auth::NextRedirectRequest) -> auth::NextRedirect;

    /// Opens a session for a browser with a token or a single-use code, and sets its cookie.
    OpenSession = "open_session": Post Json "/api/session/open" Open (session::OpenRequest) -> session::Session;
    /// Returns how users log in to the web UI.
    ReadLoginMethods = "read_login_methods": Post Json "/api/session/methods" Open (server::EmptyRequest) -> session::LoginMethods;
    /// Begins a login with the identity provider, and returns the page of the provider that the browser opens next.
    StartOidcLogin = "start_oidc_login": Post Json "/api/session/oidc/start" Open (server::EmptyRequest) -> session::OidcLogin;
    /// Opens a session for a browser that the identity provider sent back, and sets its cookie.
    FinishOidcLogin = "finish_oidc_login": Post Json "/api/session/oidc/finish" Open (session::FinishOidcRequest) -> session::Session;
    /// Returns the session of the caller.
    ReadSession = "read_session": Post Json "/api/session/get" Token (server::EmptyRequest) -> session::Session;
    /// Ends the session of the caller and removes its cookie.
    CloseSession = "close_session": Post Json "/api/session/close" Token (server::EmptyRequest) -> ();
    /// Lists the open sessions of the caller, most recently used first.
    ListSessions = "list_sessions": Post Json "/api/session/list" Token (server::EmptyRequest) -> session::SessionList;
    /// Ends sessions of the caller.
    RevokeSessions = "revoke_sessions": Post Json "/api/session/revoke" Token (session::RevokeRequest) -> ();
    /// Creates a single-use code with which a browser opens a session. Requires a token, not a session.
    CreateLoginCode = "create_login_code": Post Json "/api/session/code" Token (server::EmptyRequest) -> session::LoginCode;

    /// Lists the users that the caller may see: all users for a global admin, otherwise the caller only.
    ListUsers = "list_users": Post Json "/api/users/list" Token (users::ListRequest) -> users::UserList;
    /// Returns the caller, with credentials.
    ReadMyUser = "read_my_user": Post Json "/api/users/get_my_user" Token (server::EmptyRequest) -> users::UserWithCreds;
    /// Returns one user, with credentials.
    ReadUser = "read_user": Post Json "/api/users/get_user" SelfOrAdmin (users::NameRequest) -> users::UserWithCreds;
    /// Creates a user. The response contains the token, which is never returned again.
    CreateUser = "create_user": Post Json "/api/users/create" GlobalAdmin (users::CreateRequest) -> users::UserWithCreds;
    /// Updates the role, email address and activity of a user.
    UpdateUser = "update_user": Post Json "/api/users/update" GlobalAdmin (users::CreateRequest) -> users::User;
    /// Replaces the token of a user. The old token becomes invalid at once.
    RefreshToken = "refresh_token": Post Json "/api/users/refresh_token" SelfOrAdmin (users::NameRequest) -> users::UserWithCreds;
    /// Replaces the SSH key pair that is used to attach to runs.
    RefreshSshKey = "refresh_ssh_key": Post Json "/api/users/refresh_ssh_key" SelfOrAdmin (users::NameRequest) -> users::UserWithCreds;
    /// Deletes users.
    DeleteUsers = "delete_users": Post Json "/api/users/delete" GlobalAdmin (users::DeleteRequest) -> ();
    /// Lists the caller's additional SSH public keys.
    ListPublicKeys = "list_public_keys": Post Json "/api/users/public_keys/list" Token (server::EmptyRequest) -> Vec<users::PublicKey>;
    /// Adds an SSH public key to the caller.
    AddPublicKey = "add_public_key": Post Json "/api/users/public_keys/add" Token (users::AddPublicKeyRequest) -> users::PublicKey;
    /// Deletes SSH public keys of the caller.
    DeletePublicKeys = "delete_public_keys": Post Json "/api/users/public_keys/delete" Token (users::DeletePublicKeysRequest) -> ();

    /// Lists the caller's named tokens.
    ListTokens = "list_tokens": Post Json "/api/users/tokens/list" Token (server::EmptyRequest) -> Vec<users::NamedToken>;
    /// Creates a token with a name, a scope and an expiry. The response contains it, and it is never returned again.
    CreateToken = "create_token": Post Json "/api/users/tokens/create" Token (users::CreateTokenRequest) -> users::NewToken;
    /// Revokes tokens by name, at once.
    RevokeTokens = "revoke_tokens": Post Json "/api/users/tokens/revoke" Token (users::RevokeTokensRequest) -> ();

    /// Lists the projects that the caller may see.
    ListProjects = "list_projects": Post Json "/api/projects/list" Token (projects::ListRequest) -> projects::ProjectList;
    /// Lists the caller's projects that have no fleet.
    ListProjectsWithoutFleets = "list_projects_without_fleets": Post Json "/api/projects/list_only_no_fleets" Token (server::EmptyRequest) -> Vec<projects::Project>;
    /// Creates a project that is owned by the caller.
    CreateProject = "create_project": Post Json "/api/projects/create" Token (projects::CreateRequest) -> projects::Project;
    /// Deletes projects that the caller administers.
    DeleteProjects = "delete_projects": Post Json "/api/projects/delete" Token (projects::DeleteRequest) -> ();
    /// Returns one project with its members.
    ReadProject = "read_project": Post Json "/api/projects/{project_name}/get" ProjectPublic (server::EmptyRequest) -> projects::Project;
    /// Replaces the list of members of a project.
    SetMembers = "set_members": Post Json "/api/projects/{project_name}/set_members" ProjectManager (projects::MembersRequest) -> projects::Project;
    /// Adds members to a project, or joins a public project.
    AddMembers = "add_members": Post Json "/api/projects/{project_name}/add_members" ProjectSelfOrManager (projects::MembersRequest) -> projects::Project;
    /// Removes members from a project, or leaves it.
    RemoveMembers = "remove_members": Post Json "/api/projects/{project_name}/remove_members" ProjectSelfOrManager (projects::RemoveMembersRequest) -> projects::Project;
    /// Updates the visibility and the templates of a project.
    UpdateProject = "update_project": Post Json "/api/projects/{project_name}/update" ProjectAdmin (projects::UpdateRequest) -> projects::Project;

    /// Grants or revokes the right of a member to manage SSH fleets in a project.
    SetMemberRights = "set_member_rights": Post Json "/api/projects/set_member_rights" GlobalAdmin (projects::MemberRightsRequest) -> projects::Project;

    /// Grants a backend of the server to a project.
    GrantBackend = "grant_backend": Post Json "/api/backends/grant" GlobalAdmin (backends::GrantRequest) -> projects::Project;
    /// Revokes a backend from a project. Its existing instances on that backend stay.
    RevokeBackend = "revoke_backend": Post Json "/api/backends/revoke" GlobalAdmin (backends::GrantRequest) -> projects::Project;
    /// Lists the backends that this server has, with the projects that may use them.
    ListBackends = "list_backends": Post Json "/api/backends/list" GlobalAdmin (server::EmptyRequest) -> Vec<backends::ServerBackend>;
    /// Checks what instances of a backend need, at its provider.
    CheckBackend = "check_backend": Post Json "/api/backends/check" GlobalAdmin (backends::CheckRequest) -> Vec<backends::Finding>;
    /// Lists the types of backends that this server can use.
    ListBackendTypes = "list_backend_types": Post Json "/api/backends/list_types" Open (server::EmptyRequest) -> Vec<backends::BackendType>;

    /// Lists the names of the project's secrets.
    ListSecrets = "list_secrets": Post Json "/api/project/{project_name}/secrets/list" ProjectManager (server::EmptyRequest) -> Vec<secrets::Secret>;
    /// Returns one secret with its value.
    ReadSecret = "read_secret": Post Json "/api/project/{project_name}/secrets/get" ProjectManager (secrets::NameRequest) -> secrets::Secret;
    /// Stores a secret, encrypted.
    SetSecret = "set_secret": Post Json "/api/project/{project_name}/secrets/create_or_update" ProjectManager (secrets::SetRequest) -> secrets::Secret;
    /// Deletes secrets.
    DeleteSecrets = "delete_secrets": Post Json "/api/project/{project_name}/secrets/delete" ProjectManager (secrets::DeleteRequest) -> ();

    /// Lists events, newest first.
    ListEvents = "list_events": Post Json "/api/events/list" Token (events::ListRequest) -> Vec<events::Event>;

    /// Lists the project's repos.
    ListRepos = "list_repos": Post Json "/api/project/{project_name}/repos/list" ProjectUser (server::EmptyRequest) -> Vec<repos::RepoHead>;
    /// Returns one repo, with the caller's credentials if requested.
    ReadRepo = "read_repo": Post Json "/api/project/{project_name}/repos/get" ProjectUser (repos::ReadRequest) -> repos::RepoHeadWithCreds;
    /// Registers a repo and stores the caller's credentials for it.
    InitRepo = "init_repo": Post Json "/api/project/{project_name}/repos/init" ProjectUser (repos::InitRequest) -> ();
    /// Deletes repos.
    DeleteRepos = "delete_repos": Post Json "/api/project/{project_name}/repos/delete" ProjectOwnerOrManager (repos::DeleteRequest) -> ();
    /// Stores a diff of a repo; the file name is its SHA-256.
    UploadCode = "upload_code": Post File "/api/project/{project_name}/repos/upload_code" ProjectUser (repos::UploadCodeQuery) -> ();

    /// Returns an uploaded archive of the caller, by its hash.
    ReadArchive = "read_archive": Post Json "/api/files/get_archive_by_hash" Token (files::HashRequest) -> files::Archive;
    /// Stores an archive; the file name is its SHA-256.
    UploadArchive = "upload_archive": Post File "/api/files/upload_archive" Token (server::EmptyRequest) -> files::Archive;

    /// Lists rows of runs that the caller may see, with counts by status.
    ListRunRows = "list_run_rows": Post Json "/api/runs/rows" Token (rows::RowsRequest) -> rows::Rows<rows::RunRow>;
    /// Lists rows of managed jobs that the caller may see, one for each task, with counts by status.
    ListManagedJobRows = "list_managed_job_rows": Post Json "/api/jobs/rows" Token (rows::RowsRequest) -> rows::Rows<rows::ManagedJobRow>;
    /// Lists rows of instances that the caller may see, with counts by status.
    ListInstanceRows = "list_instance_rows": Post Json "/api/instances/rows" Token (rows::RowsRequest) -> rows::Rows<rows::InstanceRow>;
    /// Lists rows of queued containers that the caller may see, with counts by state.
    ListContainerRows = "list_container_rows": Post Json "/api/containers/rows" Token (rows::RowsRequest) -> rows::Rows<rows::ContainerRow>;
    /// Lists the dispatchers of the container queue, with the containers that they hold.
    ListDispatchers = "list_dispatchers": Post Json "/api/dispatchers/list" Token (server::EmptyRequest) -> dispatchers::DispatcherList;
    /// Returns counts, capacity, costs and problems of everything that the caller may see.
    ReadSummary = "read_summary": Post Json "/api/summary" Token (overview::SummaryRequest) -> overview::Summary;
    /// Searches names and ids of everything that the caller may see.
    SearchNames = "search_names": Post Json "/api/search" Token (overview::SearchRequest) -> overview::SearchResult;

    /// Lists saved views of the caller and of the caller's projects.
    ListViews = "list_views": Post Json "/api/views/list" Token (server::EmptyRequest) -> views::ViewList;
    /// Saves a view, for the caller or for the members of a project.
    SetView = "set_view": Post Json "/api/views/set" Token (views::SetRequest) -> views::View;
    /// Deletes a view that the caller saved.
    DeleteView = "delete_view": Post Json "/api/views/delete" Token (views::DeleteRequest) -> ();
    /// Returns series of metrics of jobs, instances, fleets or services over the same times.
    QueryMetrics = "query_metrics": Post Json "/api/metrics/query" Token (metrics::SeriesRequest) -> metrics::SeriesList;
    /// Streams the blocks of all instances that the caller may see, with their jobs and use, every five seconds.
    StreamBlocks = "stream_blocks": Get Events "/api/metrics/stream" Token (metrics::BlockStreamRequest) -> metrics::BlockEvent;
    /// Streams changes of everything that the caller may see.
    StreamChanges = "stream_changes": Get Events "/api/changes/stream" Token (changes::StreamRequest) -> changes::FeedEvent;
    /// Lists the runs that wait for an instance, in the order in which instances are assigned.
    ListQueue = "list_queue": Post Json "/api/queue/list" Token (server::EmptyRequest) -> explanations::QueueList;
    /// Explains why a run waits, runs, or ended.
    ExplainRun = "explain_run": Post Json "/api/project/{project_name}/runs/why" ProjectUser (explanations::RunRequest) -> explanations::Explanation;
    /// Explains why a managed job waits, runs, or ended.
    ExplainManagedJob = "explain_managed_job": Post Json "/api/project/{project_name}/jobs/why" ProjectUser (explanations::ManagedJobRequest) -> explanations::Explanation;
    /// Explains why an instance is kept, not ready, or ended.
    ExplainInstance = "explain_instance": Post Json "/api/project/{project_name}/instances/why" ProjectUser (explanations::InstanceRequest) -> explanations::Explanation;
    /// Returns the phases of the jobs of a run or a managed job over time.
    ReadTimeline = "read_timeline": Post Json "/api/project/{project_name}/runs/timeline" ProjectUser (explanations::TimelineRequest) -> explanations::Timeline;

    /// Plans variants of a run: whether they start now, at what price, and why not.
    CompareVariants = "compare_variants": Post Json "/api/project/{project_name}/runs/what_if" ProjectUser (explanations::WhatIfRequest) -> explanations::WhatIfResult;
    /// Lists the stored deployments of a service, newest first.
    ListDeployments = "list_deployments": Post Json "/api/project/{project_name}/runs/deployments" ProjectUser (explanations::DeploymentRequest) -> explanations::DeploymentList;

    /// Applies the specification of an earlier deployment of a service as a new deployment.
    RedeployService = "redeploy_service": Post Json "/api/project/{project_name}/runs/redeploy" ProjectOwnerOrManager (explanations::RedeployRequest) -> ();
    /// Opens a shell in a job. The connection becomes a WebSocket with the protocol `windlass.terminal.v1`.
    OpenTerminal = "open_terminal": Get Stream "/api/project/{project_name}/runs/terminal" ProjectOwnerOrManager (runs::TerminalRequest) -> ();
    /// Checks the text of a configuration or of a task file.
    CheckConfiguration = "check_configuration": Post Json "/api/project/{project_name}/configurations/check" ProjectUser (configurations::CheckRequest) -> configurations::CheckResult;
    /// Checks a text and plans it, without applying anything.
    PlanConfiguration = "plan_configuration": Post Json "/api/project/{project_name}/configurations/plan" ProjectUser (configurations::PlanTextRequest) -> configurations::PlanTextResult;

    /// Lists the runs of the caller's projects, newest first.
    ListRuns = "list_runs": Post Json "/api/runs/list" Token (runs::ListRequest) -> Vec<runs::Run>;
    /// Returns one run.
    ReadRun = "read_run": Post Json "/api/project/{project_name}/runs/get" ProjectUser (runs::ReadRequest) -> runs::Run;
    /// Returns the effects of applying a configuration, without applying it.
    PlanRun = "plan_run": Post Json "/api/project/{project_name}/runs/get_plan" ProjectUser (runs::PlanRequest) -> runs::RunPlan;
    /// Submits a run, or updates one in place. Requires its creator or a manager of the project.
    ApplyRun = "apply_run": Post Json "/api/project/{project_name}/runs/apply" ProjectOwnerOrManager (runs::ApplyRequest) -> runs::Run;
    /// Stops runs. Requires their creator or a manager of the project.
    StopRuns = "stop_runs": Post Json "/api/project/{project_name}/runs/stop" ProjectOwnerOrManager (runs::StopRequest) -> ();
    /// Connects to a port of a job, or to its SSH server. Requires its owner or a manager of the project.
    ConnectJob = "connect_job": Get Stream "/api/project/{project_name}/runs/connect" ProjectOwnerOrManager (runs::ConnectRequest) -> ();
    /// Hides finished runs. Requires their creator or a manager of the project.
    DeleteRuns = "delete_runs": Post Json "/api/project/{project_name}/runs/delete" ProjectOwnerOrManager (runs::DeleteRequest) -> ();
    /// Returns a page of the log of a job.
    PollLogs = "poll_logs": Post Json "/api/project/{project_name}/logs/poll" ProjectUser (logs::PollRequest) -> logs::Page;
    /// Streams the log of a job as it is written.
    StreamLogs = "stream_logs": Get Events "/api/project/{project_name}/logs/stream" ProjectUser (logs::StreamRequest) -> logs::StreamEvent;
    /// Returns bytes of the log of a job, by offset, or all of it as a file.
    ReadRawLog = "read_raw_log": Get Bytes "/api/project/{project_name}/logs/raw" ProjectUser (logs::RawRequest) -> ();
    /// Searches the log of a job and streams the hits.
    SearchLog = "search_log": Get Events "/api/project/{project_name}/logs/search" ProjectUser (logs::SearchRequest) -> logs::SearchEvent;
    /// Returns the times at which parts of the log of a job were written.
    ReadLogMarks = "read_log_marks": Post Json "/api/project/{project_name}/logs/marks" ProjectUser (logs::MarksRequest) -> logs::LogMarks;
    /// Returns the resource usage of a job over time.
    ReadJobMetrics = "read_job_metrics": Get Query "/api/project/{project_name}/metrics/job/{run_name}" ProjectUser (metrics::Query) -> metrics::JobMetrics;
    /// Returns recent request metrics of a service.
    ReadServiceMetrics = "read_service_metrics": Get Query "/api/project/{project_name}/metrics/service/{run_name}" ProjectUser (metrics::ServiceQuery) -> metrics::ServiceMetrics;
    /// Lists available GPUs, grouped.
    ListGpus = "list_gpus": Post Json "/api/project/{project_name}/gpus/list" ProjectUser (gpus::ListRequest) -> gpus::GpuList;

    /// Launches managed jobs from a task file.
    LaunchManagedJobs = "launch_managed_jobs": Post Json "/api/project/{project_name}/jobs/launch" ProjectUser (managed_jobs::LaunchRequest) -> managed_jobs::LaunchResponse;
    /// Validates a task file and lists its parts without effect; launches nothing. Its archives need not exist.
    CheckManagedJobs = "check_managed_jobs": Post Json "/api/project/{project_name}/jobs/check" ProjectUser (managed_jobs::LaunchRequest) -> managed_jobs::LaunchResponse;
    /// Lists the managed jobs of the project, newest first.
    ListManagedJobs = "list_managed_jobs": Post Json "/api/project/{project_name}/jobs/list" ProjectUser (managed_jobs::ListRequest) -> Vec<managed_jobs::ManagedJob>;
    /// Returns one managed job, with the runs of its attempts.
    ReadManagedJob = "read_managed_job": Post Json "/api/project/{project_name}/jobs/get" ProjectUser (managed_jobs::ReadRequest) -> managed_jobs::ManagedJob;
    /// Cancels managed jobs. Requires their owner or a manager of the project.
    CancelManagedJobs = "cancel_managed_jobs": Post Json "/api/project/{project_name}/jobs/cancel" ProjectOwnerOrManager (managed_jobs::CancelRequest) -> managed_jobs::CancelResponse;

    /// Resumes a managed job that ended without success, under its number. Requires its owner or a manager of the project.
    ResumeManagedJob = "resume_managed_job": Post Json "/api/project/{project_name}/jobs/resume" ProjectOwnerOrManager (managed_jobs::ResumeRequest) -> managed_jobs::ManagedJob;

    /// Returns what a managed job cost, compared with on-demand nodes, and its progress towards its deadline.
    ReadSavings = "read_savings": Post Json "/api/project/{project_name}/jobs/savings" ProjectUser (managed_jobs::ReadRequest) -> managed_jobs::Savings;

    /// Lists the costs of the project's instances over a period, by run, user or fleet; the highest first.
    ListCosts = "list_costs": Post Json "/api/project/{project_name}/costs/list" ProjectUser (costs::ListRequest) -> costs::CostReport;

    /// Lists the fleets of the caller's projects.
    ListFleets = "list_fleets": Post Json "/api/fleets/list" Token (fleets::ListRequest) -> Vec<fleets::Fleet>;
    /// Lists the fleets of one project.
    ListProjectFleets = "list_project_fleets": Post Json "/api/project/{project_name}/fleets/list" ProjectUser (fleets::ProjectListRequest) -> Vec<fleets::Fleet>;
    /// Returns one fleet with its instances.
    ReadFleet = "read_fleet": Post Json "/api/project/{project_name}/fleets/get" ProjectUser (fleets::ReadRequest) -> fleets::Fleet;
    /// Returns the effects of applying a fleet, without applying it.
    PlanFleet = "plan_fleet": Post Json "/api/project/{project_name}/fleets/get_plan" ProjectUser (fleets::PlanRequest) -> fleets::FleetPlan;
    /// Creates a fleet, or updates one in place. Requires its creator or a manager of the project.
    ApplyFleet = "apply_fleet": Post Json "/api/project/{project_name}/fleets/apply" ProjectOwnerOrManager (fleets::ApplyRequest) -> fleets::Fleet;
    /// Deletes fleets. Requires their creator or a manager of the project.
    DeleteFleets = "delete_fleets": Post Json "/api/project/{project_name}/fleets/delete" ProjectOwnerOrManager (fleets::DeleteRequest) -> ();
    /// Deletes single instances of a fleet. Requires its creator or a manager of the project.
    DeleteFleetInstances = "delete_fleet_instances": Post Json "/api/project/{project_name}/fleets/delete_instances" ProjectOwnerOrManager (fleets::DeleteInstancesRequest) -> ();

    /// Lists the instances of the caller's projects.
    ListInstances = "list_instances": Post Json "/api/instances/list" Token (instances::ListRequest) -> Vec<instances::Instance>;
    /// Returns one instance.
    ReadInstance = "read_instance": Post Json "/api/project/{project_name}/instances/get" ProjectUser (instances::ReadRequest) -> instances::Instance;
    /// Lists the jobs that ran on an instance, newest first.
    ListInstanceJobs = "list_instance_jobs": Post Json "/api/project/{project_name}/instances/history" ProjectUser (instances::HistoryRequest) -> instances::InstanceHistory;
    /// Lists past health checks of an instance.
    ListHealthChecks = "list_health_checks": Post Json "/api/project/{project_name}/instances/get_instance_health_checks" ProjectUser (instances::HealthChecksRequest) -> instances::HealthChecks;

    /// Lists the volumes of the caller's projects.
    ListVolumes = "list_volumes": Post Json "/api/volumes/list" Token (volumes::ListRequest) -> Vec<volumes::Volume>;
    /// Lists the volumes of one project.
    ListProjectVolumes = "list_project_volumes": Post Json "/api/project/{project_name}/volumes/list" ProjectUser (server::EmptyRequest) -> Vec<volumes::Volume>;
    /// Returns one volume.
    ReadVolume = "read_volume": Post Json "/api/project/{project_name}/volumes/get" ProjectUser (volumes::NameRequest) -> volumes::Volume;
    /// Creates a volume.
    CreateVolume = "create_volume": Post Json "/api/project/{project_name}/volumes/create" ProjectUser (volumes::CreateRequest) -> volumes::Volume;
    /// Deletes volumes. Requires their creator or a manager of the project.
    DeleteVolumes = "delete_volumes": Post Json "/api/project/{project_name}/volumes/delete" ProjectOwnerOrManager (volumes::DeleteRequest) -> ();

    /// Lists the gateways of a project.
    ListGateways = "list_gateways": Post Json "/api/project/{project_name}/gateways/list" ProjectPublic (gateways::ListRequest) -> Vec<gateways::Gateway>;
    /// Returns one gateway.
    ReadGateway = "read_gateway": Post Json "/api/project/{project_name}/gateways/get" ProjectUser (gateways::NameRequest) -> gateways::Gateway;
    /// Returns the effects of applying a gateway, without applying it.
    PlanGateway = "plan_gateway": Post Json "/api/project/{project_name}/gateways/get_plan" ProjectAdmin (gateways::PlanRequest) -> gateways::GatewayPlan;
    /// Creates a gateway, or updates one in place.
    ApplyGateway = "apply_gateway": Post Json "/api/project/{project_name}/gateways/apply" ProjectAdmin (gateways::ApplyRequest) -> gateways::Gateway;
    /// Creates a gateway (legacy; `apply_gateway` replaces it).
    CreateGateway = "create_gateway": Post Json "/api/project/{project_name}/gateways/create" ProjectAdmin (gateways::CreateRequest) -> gateways::Gateway;
    /// Deletes gateways.
    DeleteGateways = "delete_gateways": Post Json "/api/project/{project_name}/gateways/delete" ProjectAdmin (gateways::DeleteRequest) -> ();
    /// Makes a gateway the project's default.
    SetDefaultGateway = "set_default_gateway": Post Json "/api/project/{project_name}/gateways/set_default" ProjectAdmin (gateways::SetDefaultRequest) -> ();
    /// Changes the domain under which services are published.
    SetWildcardDomain = "set_wildcard_domain": Post Json "/api/project/{project_name}/gateways/set_wildcard_domain" ProjectAdmin (gateways::SetWildcardDomainRequest) -> gateways::Gateway;
    /// Creates a gateway's token, which is never returned again. The old token becomes invalid at once.
    CreateGatewayToken = "create_gateway_token": Post Json "/api/project/{project_name}/gateways/create_token" ProjectAdmin (gateways::NameRequest) -> gateways::GatewayToken;
    /// Returns the routes of a gateway, as soon as they differ from the caller's version or the wait is over.
    ReadGatewayRoutes = "read_gateway_routes": Post Json "/api/gateway/routes" Gateway (gateways::RoutesRequest) -> gateways::GatewayRoutes;
    /// Reports the requests to a gateway and the replicas that it has finished draining.
    ReportGateway = "report_gateway": Post Json "/api/gateway/report" Gateway (gateways::GatewayReport) -> ();
    /// Checks whether a token permits requests to the services of a project.
    CheckServiceToken = "check_service_token": Post Json "/api/gateway/check" Gateway (gateways::TokenCheckRequest) -> gateways::TokenCheck;
    /// Deregisters a gateway process that exits.
    LeaveGateway = "leave_gateway": Post Json "/api/gateway/leave" Gateway (gateways::LeaveRequest) -> ();

    /// Lists what the project shares with others.
    ListExports = "list_exports": Post Json "/api/project/{project_name}/exports/list" ProjectUser (server::EmptyRequest) -> exports::Exports;
    /// Shares fleets and gateways with other projects. Requires an admin of each of them; with all projects, a global admin.
    CreateExport = "create_export": Post Json "/api/project/{project_name}/exports/create" ProjectAdmin (exports::CreateRequest) -> exports::Export;
    /// Changes what an export shares, and with whom.
    UpdateExport = "update_export": Post Json "/api/project/{project_name}/exports/update" ProjectAdmin (exports::UpdateRequest) -> exports::Export;
    /// Ends an export. Jobs of other projects on its fleets end.
    DeleteExport = "delete_export": Post Json "/api/project/{project_name}/exports/delete" ProjectAdmin (exports::NameRequest) -> ();
    /// Lists what others share with the project.
    ListImports = "list_imports": Post Json "/api/project/{project_name}/imports/list" ProjectUser (server::EmptyRequest) -> exports::Imports;
    /// Ends the project's use of an export. Its jobs on the fleets of the export end.
    DeleteImport = "delete_import": Post Json "/api/project/{project_name}/imports/delete" ProjectAdmin (exports::DeleteImportRequest) -> ();
    /// Returns the usage of projects that the caller may see: GPU hours, CPU hours and cost by project, user, class and time.
    ListUsage = "list_usage": Post Json "/api/usage/list" Token (usage::ListRequest) -> usage::UsageReport;
    /// Lists the budgets of the project and its members, with what is spent.
    ListBudgets = "list_budgets": Post Json "/api/project/{project_name}/budgets/list" ProjectUser (server::EmptyRequest) -> budgets::Budgets;
    /// Sets a budget. One of a member requires a manager of the project, one of the whole project a global admin.
    SetBudget = "set_budget": Post Json "/api/project/{project_name}/budgets/set" ProjectManager (budgets::SetRequest) -> budgets::Budgets;
    /// Deletes a budget, with the same rights.
    DeleteBudget = "delete_budget": Post Json "/api/project/{project_name}/budgets/delete" ProjectManager (budgets::DeleteRequest) -> budgets::Budgets;
    /// Lists the quotas of the project and its members, with their use.
    ListQuotas = "list_quotas": Post Json "/api/project/{project_name}/quotas/list" ProjectUser (server::EmptyRequest) -> quotas::Quotas;
    /// Sets a quota. One of a member requires a manager of the project, one of the whole project a global admin.
    SetQuota = "set_quota": Post Json "/api/project/{project_name}/quotas/set" ProjectManager (quotas::SetRequest) -> quotas::Quotas;
    /// Deletes a quota, with the same rights.
    DeleteQuota = "delete_quota": Post Json "/api/project/{project_name}/quotas/delete" ProjectManager (quotas::DeleteRequest) -> quotas::Quotas;
    /// Lists the templates that the UI offers.
    ListTemplates = "list_templates": Post Json "/api/project/{project_name}/templates/list" ProjectUser (server::EmptyRequest) -> Vec<templates::Template>;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::table;
    use crate::operation::{Body, Method};

    #[test]
    fn operation_ids_and_routes_are_unique() {
        let table = table();
        let ids: BTreeSet<_> = table.iter().map(|entry| entry.id).collect();
        let places: BTreeSet<_> = table.iter().map(|entry| (entry.method.name(), entry.path)).collect();
        assert_eq!(ids.len(), table.len());
        assert_eq!(places.len(), table.len());
    }

    #[test]
    fn access_and_body_kind_match_the_path_and_method_of_each_operation() {
        for entry in table() {
            let named = entry.parameters().next() == Some("project_name");
            assert_eq!(entry.access.in_project(), named, "{}", entry.id);
            assert_eq!(
                matches!(entry.body, Body::Query | Body::Text | Body::Bytes | Body::Events | Body::Stream),
                entry.method == Method::Get,
                "{}",
                entry.id
            );
        }
    }
}
