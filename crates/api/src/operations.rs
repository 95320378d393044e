//! The operation table.
//!
//! Adding an endpoint starts here: a line, its two types, a handler. What other servers of this API
//! answer and this one does not is listed with the reason in `docs/api/missing.md`.

use crate::{
    auth, backends, costs, events, exports, files, fleets, gateways, gpus, instances, logs, managed_jobs,
    metrics, operation::operations, projects, repos, runs, secrets, server, templates, users, volumes,
};

operations! {
    /// Says that the server runs.
    CheckHealth = "check_health": Get Query "/healthcheck" Open (server::EmptyRequest) -> server::Health;
    /// Counters and gauges of the server, for Prometheus.
    ReadMetrics = "read_metrics": Get Text "/metrics" GlobalAdmin (server::EmptyRequest) -> String;
    /// The version of the API this server speaks.
    ReadServerInfo = "read_server_info": Post Json "/api/server/get_info" Open (server::EmptyRequest) -> server::Info;
    /// How each pipeline of the replica that answers is doing.
    ListPipelines = "list_pipelines": Post Json "/api/server/pipelines" GlobalAdmin (server::EmptyRequest) -> Vec<server::Pipeline>;

    /// Ways to log in beside a token.
    ListAuthProviders = "list_auth_providers": Post Json "/api/auth/list_providers" Open (server::EmptyRequest) -> Vec<auth::Provider>;
    /// Where a browser goes next in a login.
    ReadNextRedirect = "read_next_redirect": Post Json "/api/auth/get_next_redirect" Open (auth::NextRedirectRequest) -> auth::NextRedirect;

    /// Users the caller may see: everyone for a global admin, else the caller.
    ListUsers = "list_users": Post Json "/api/users/list" Token (users::ListRequest) -> users::UserList;
    /// The caller, with credentials.
    ReadMyUser = "read_my_user": Post Json "/api/users/get_my_user" Token (server::EmptyRequest) -> users::UserWithCreds;
    /// One user, with credentials.
    ReadUser = "read_user": Post Json "/api/users/get_user" SelfOrAdmin (users::NameRequest) -> users::UserWithCreds;
    /// Adds a user. The answer holds the token, which is never shown again.
    CreateUser = "create_user": Post Json "/api/users/create" GlobalAdmin (users::CreateRequest) -> users::UserWithCreds;
    /// Changes role, address and activity of a user.
    UpdateUser = "update_user": Post Json "/api/users/update" GlobalAdmin (users::CreateRequest) -> users::User;
    /// Replaces the token; the old one dies at once.
    RefreshToken = "refresh_token": Post Json "/api/users/refresh_token" SelfOrAdmin (users::NameRequest) -> users::UserWithCreds;
    /// Replaces the SSH key pair that attaching uses.
    RefreshSshKey = "refresh_ssh_key": Post Json "/api/users/refresh_ssh_key" SelfOrAdmin (users::NameRequest) -> users::UserWithCreds;
    /// Removes users.
    DeleteUsers = "delete_users": Post Json "/api/users/delete" GlobalAdmin (users::DeleteRequest) -> ();
    /// The caller's additional SSH public keys.
    ListPublicKeys = "list_public_keys": Post Json "/api/users/public_keys/list" Token (server::EmptyRequest) -> Vec<users::PublicKey>;
    /// Adds an SSH public key to the caller.
    AddPublicKey = "add_public_key": Post Json "/api/users/public_keys/add" Token (users::AddPublicKeyRequest) -> users::PublicKey;
    /// Removes SSH public keys from the caller.
    DeletePublicKeys = "delete_public_keys": Post Json "/api/users/public_keys/delete" Token (users::DeletePublicKeysRequest) -> ();

    /// The caller's tokens beside the first one.
    ListTokens = "list_tokens": Post Json "/api/users/tokens/list" Token (server::EmptyRequest) -> Vec<users::NamedToken>;
    /// Makes a token with a name, a scope and an expiry. The answer holds it, and it is never shown again.
    CreateToken = "create_token": Post Json "/api/users/tokens/create" Token (users::CreateTokenRequest) -> users::NewToken;
    /// Ends tokens by their names, at once.
    RevokeTokens = "revoke_tokens": Post Json "/api/users/tokens/revoke" Token (users::RevokeTokensRequest) -> ();

    /// Projects the caller may see.
    ListProjects = "list_projects": Post Json "/api/projects/list" Token (projects::ListRequest) -> projects::ProjectList;
    /// The caller's projects that have no fleet.
    ListProjectsWithoutFleets = "list_projects_without_fleets": Post Json "/api/projects/list_only_no_fleets" Token (server::EmptyRequest) -> Vec<projects::Project>;
    /// Adds a project owned by the caller.
    CreateProject = "create_project": Post Json "/api/projects/create" Token (projects::CreateRequest) -> projects::Project;
    /// Removes projects the caller administers.
    DeleteProjects = "delete_projects": Post Json "/api/projects/delete" Token (projects::DeleteRequest) -> ();
    /// One project with its members.
    ReadProject = "read_project": Post Json "/api/projects/{project_name}/get" ProjectPublic (server::EmptyRequest) -> projects::Project;
    /// Replaces the list of members.
    SetMembers = "set_members": Post Json "/api/projects/{project_name}/set_members" ProjectManager (projects::MembersRequest) -> projects::Project;
    /// Adds members, or joins a public project.
    AddMembers = "add_members": Post Json "/api/projects/{project_name}/add_members" ProjectSelfOrManager (projects::MembersRequest) -> projects::Project;
    /// Removes members, or leaves.
    RemoveMembers = "remove_members": Post Json "/api/projects/{project_name}/remove_members" ProjectSelfOrManager (projects::RemoveMembersRequest) -> projects::Project;
    /// Changes a project's visibility and templates.
    UpdateProject = "update_project": Post Json "/api/projects/{project_name}/update" ProjectAdmin (projects::UpdateRequest) -> projects::Project;

    /// Gives a member the right to manage SSH fleets in a project, or takes it away.
    SetMemberRights = "set_member_rights": Post Json "/api/projects/set_member_rights" GlobalAdmin (projects::MemberRightsRequest) -> projects::Project;

    /// Lets a project use a backend of the server.
    GrantBackend = "grant_backend": Post Json "/api/backends/grant" GlobalAdmin (backends::GrantRequest) -> projects::Project;
    /// No longer lets a project use a backend. Instances that it has there stay.
    RevokeBackend = "revoke_backend": Post Json "/api/backends/revoke" GlobalAdmin (backends::GrantRequest) -> projects::Project;
    /// Kinds of backends this server can use.
    ListBackendTypes = "list_backend_types": Post Json "/api/backends/list_types" Open (server::EmptyRequest) -> Vec<backends::BackendType>;

    /// Names of the project's secrets.
    ListSecrets = "list_secrets": Post Json "/api/project/{project_name}/secrets/list" ProjectManager (server::EmptyRequest) -> Vec<secrets::Secret>;
    /// One secret with its value.
    ReadSecret = "read_secret": Post Json "/api/project/{project_name}/secrets/get" ProjectManager (secrets::NameRequest) -> secrets::Secret;
    /// Stores a secret, encrypted.
    SetSecret = "set_secret": Post Json "/api/project/{project_name}/secrets/create_or_update" ProjectManager (secrets::SetRequest) -> secrets::Secret;
    /// Removes secrets.
    DeleteSecrets = "delete_secrets": Post Json "/api/project/{project_name}/secrets/delete" ProjectManager (secrets::DeleteRequest) -> ();

    /// What happened, newest first.
    ListEvents = "list_events": Post Json "/api/events/list" Token (events::ListRequest) -> Vec<events::Event>;

    /// The project's repos.
    ListRepos = "list_repos": Post Json "/api/project/{project_name}/repos/list" ProjectUser (server::EmptyRequest) -> Vec<repos::RepoHead>;
    /// One repo, with the caller's credentials if asked.
    ReadRepo = "read_repo": Post Json "/api/project/{project_name}/repos/get" ProjectUser (repos::ReadRequest) -> repos::RepoHeadWithCreds;
    /// Makes a repo known and stores the caller's credentials for it.
    InitRepo = "init_repo": Post Json "/api/project/{project_name}/repos/init" ProjectUser (repos::InitRequest) -> ();
    /// Removes repos.
    DeleteRepos = "delete_repos": Post Json "/api/project/{project_name}/repos/delete" ProjectUser (repos::DeleteRequest) -> ();
    /// Stores a diff of a repo; the file name is its SHA-256.
    UploadCode = "upload_code": Post File "/api/project/{project_name}/repos/upload_code" ProjectUser (repos::UploadCodeQuery) -> ();

    /// Finds an uploaded archive of the caller.
    ReadArchive = "read_archive": Post Json "/api/files/get_archive_by_hash" Token (files::HashRequest) -> files::Archive;
    /// Stores an archive; the file name is its SHA-256.
    UploadArchive = "upload_archive": Post File "/api/files/upload_archive" Token (server::EmptyRequest) -> files::Archive;

    /// Runs of the caller's projects, newest first.
    ListRuns = "list_runs": Post Json "/api/runs/list" Token (runs::ListRequest) -> Vec<runs::Run>;
    /// One run.
    ReadRun = "read_run": Post Json "/api/project/{project_name}/runs/get" ProjectUser (runs::ReadRequest) -> runs::Run;
    /// What applying a configuration would do.
    PlanRun = "plan_run": Post Json "/api/project/{project_name}/runs/get_plan" ProjectUser (runs::PlanRequest) -> runs::RunPlan;
    /// Submits a run, or updates one in place: its creator, and managers of the project.
    ApplyRun = "apply_run": Post Json "/api/project/{project_name}/runs/apply" ProjectOwnerOrManager (runs::ApplyRequest) -> runs::Run;
    /// Asks runs to end: their creator, and managers of the project.
    StopRuns = "stop_runs": Post Json "/api/project/{project_name}/runs/stop" ProjectOwnerOrManager (runs::StopRequest) -> ();
    /// Connects to a port of a job, or to its SSH server: its owner, and managers of the project.
    ConnectJob = "connect_job": Get Stream "/api/project/{project_name}/runs/connect" ProjectOwnerOrManager (runs::ConnectRequest) -> ();
    /// Hides finished runs: their creator, and managers of the project.
    DeleteRuns = "delete_runs": Post Json "/api/project/{project_name}/runs/delete" ProjectOwnerOrManager (runs::DeleteRequest) -> ();
    /// What a job wrote.
    PollLogs = "poll_logs": Post Json "/api/project/{project_name}/logs/poll" ProjectUser (logs::PollRequest) -> logs::Page;
    /// What a job writes, as it comes.
    StreamLogs = "stream_logs": Get Events "/api/project/{project_name}/logs/stream" ProjectUser (logs::StreamRequest) -> logs::StreamEvent;
    /// What a job used.
    ReadJobMetrics = "read_job_metrics": Get Query "/api/project/{project_name}/metrics/job/{run_name}" ProjectUser (metrics::Query) -> metrics::JobMetrics;
    /// What a service was asked lately.
    ReadServiceMetrics = "read_service_metrics": Get Query "/api/project/{project_name}/metrics/service/{run_name}" ProjectUser (metrics::ServiceQuery) -> metrics::ServiceMetrics;
    /// GPUs on offer, grouped.
    ListGpus = "list_gpus": Post Json "/api/project/{project_name}/gpus/list" ProjectUser (gpus::ListRequest) -> gpus::GpuList;

    /// Launches managed jobs from a task file.
    LaunchManagedJobs = "launch_managed_jobs": Post Json "/api/project/{project_name}/jobs/launch" ProjectUser (managed_jobs::LaunchRequest) -> managed_jobs::LaunchResponse;
    /// Says what is wrong with a task file, and what of it has no effect; launches nothing. Its archives need not be there.
    CheckManagedJobs = "check_managed_jobs": Post Json "/api/project/{project_name}/jobs/check" ProjectUser (managed_jobs::LaunchRequest) -> managed_jobs::LaunchResponse;
    /// Managed jobs of the project, newest first.
    ListManagedJobs = "list_managed_jobs": Post Json "/api/project/{project_name}/jobs/list" ProjectUser (managed_jobs::ListRequest) -> Vec<managed_jobs::ManagedJob>;
    /// One managed job, with the runs of its attempts.
    ReadManagedJob = "read_managed_job": Post Json "/api/project/{project_name}/jobs/get" ProjectUser (managed_jobs::ReadRequest) -> managed_jobs::ManagedJob;
    /// Asks managed jobs to end: their owner, and managers of the project.
    CancelManagedJobs = "cancel_managed_jobs": Post Json "/api/project/{project_name}/jobs/cancel" ProjectOwnerOrManager (managed_jobs::CancelRequest) -> managed_jobs::CancelResponse;

    /// What the project's machines cost over a period, by run, user or fleet; the dearest first.
    ListCosts = "list_costs": Post Json "/api/project/{project_name}/costs/list" ProjectUser (costs::ListRequest) -> costs::CostReport;

    /// Fleets of the caller's projects.
    ListFleets = "list_fleets": Post Json "/api/fleets/list" Token (fleets::ListRequest) -> Vec<fleets::Fleet>;
    /// Fleets of one project.
    ListProjectFleets = "list_project_fleets": Post Json "/api/project/{project_name}/fleets/list" ProjectUser (fleets::ProjectListRequest) -> Vec<fleets::Fleet>;
    /// One fleet with its instances.
    ReadFleet = "read_fleet": Post Json "/api/project/{project_name}/fleets/get" ProjectUser (fleets::ReadRequest) -> fleets::Fleet;
    /// What applying a fleet would do.
    PlanFleet = "plan_fleet": Post Json "/api/project/{project_name}/fleets/get_plan" ProjectUser (fleets::PlanRequest) -> fleets::FleetPlan;
    /// Creates a fleet, or updates one in place: its creator, and managers of the project.
    ApplyFleet = "apply_fleet": Post Json "/api/project/{project_name}/fleets/apply" ProjectOwnerOrManager (fleets::ApplyRequest) -> fleets::Fleet;
    /// Asks fleets to end: their creator, and managers of the project.
    DeleteFleets = "delete_fleets": Post Json "/api/project/{project_name}/fleets/delete" ProjectOwnerOrManager (fleets::DeleteRequest) -> ();
    /// Asks single instances of a fleet to end: its creator, and managers of the project.
    DeleteFleetInstances = "delete_fleet_instances": Post Json "/api/project/{project_name}/fleets/delete_instances" ProjectOwnerOrManager (fleets::DeleteInstancesRequest) -> ();

    /// Instances of the caller's projects.
    ListInstances = "list_instances": Post Json "/api/instances/list" Token (instances::ListRequest) -> Vec<instances::Instance>;
    /// One instance.
    ReadInstance = "read_instance": Post Json "/api/project/{project_name}/instances/get" ProjectUser (instances::ReadRequest) -> instances::Instance;
    /// Past health checks of an instance.
    ListHealthChecks = "list_health_checks": Post Json "/api/project/{project_name}/instances/get_instance_health_checks" ProjectUser (instances::HealthChecksRequest) -> instances::HealthChecks;

    /// Volumes of the caller's projects.
    ListVolumes = "list_volumes": Post Json "/api/volumes/list" Token (volumes::ListRequest) -> Vec<volumes::Volume>;
    /// Volumes of one project.
    ListProjectVolumes = "list_project_volumes": Post Json "/api/project/{project_name}/volumes/list" ProjectUser (server::EmptyRequest) -> Vec<volumes::Volume>;
    /// One volume.
    ReadVolume = "read_volume": Post Json "/api/project/{project_name}/volumes/get" ProjectUser (volumes::NameRequest) -> volumes::Volume;
    /// Creates a volume.
    CreateVolume = "create_volume": Post Json "/api/project/{project_name}/volumes/create" ProjectUser (volumes::CreateRequest) -> volumes::Volume;
    /// Asks volumes to end: their creator, and managers of the project.
    DeleteVolumes = "delete_volumes": Post Json "/api/project/{project_name}/volumes/delete" ProjectOwnerOrManager (volumes::DeleteRequest) -> ();

    /// Gateways of a project.
    ListGateways = "list_gateways": Post Json "/api/project/{project_name}/gateways/list" ProjectPublic (gateways::ListRequest) -> Vec<gateways::Gateway>;
    /// One gateway.
    ReadGateway = "read_gateway": Post Json "/api/project/{project_name}/gateways/get" ProjectUser (gateways::NameRequest) -> gateways::Gateway;
    /// What applying a gateway would do.
    PlanGateway = "plan_gateway": Post Json "/api/project/{project_name}/gateways/get_plan" ProjectAdmin (gateways::PlanRequest) -> gateways::GatewayPlan;
    /// Creates a gateway, or updates one in place.
    ApplyGateway = "apply_gateway": Post Json "/api/project/{project_name}/gateways/apply" ProjectAdmin (gateways::ApplyRequest) -> gateways::Gateway;
    /// Creates a gateway, the old way.
    CreateGateway = "create_gateway": Post Json "/api/project/{project_name}/gateways/create" ProjectAdmin (gateways::CreateRequest) -> gateways::Gateway;
    /// Asks gateways to end.
    DeleteGateways = "delete_gateways": Post Json "/api/project/{project_name}/gateways/delete" ProjectAdmin (gateways::DeleteRequest) -> ();
    /// Makes a gateway the project's default.
    SetDefaultGateway = "set_default_gateway": Post Json "/api/project/{project_name}/gateways/set_default" ProjectAdmin (gateways::SetDefaultRequest) -> ();
    /// Changes the domain under which services appear.
    SetWildcardDomain = "set_wildcard_domain": Post Json "/api/project/{project_name}/gateways/set_wildcard_domain" ProjectAdmin (gateways::SetWildcardDomainRequest) -> gateways::Gateway;
    /// Makes a new token for the processes of a gateway. The old one dies at once; the new one is never shown again.
    CreateGatewayToken = "create_gateway_token": Post Json "/api/project/{project_name}/gateways/create_token" ProjectAdmin (gateways::NameRequest) -> gateways::GatewayToken;
    /// The routes of a gateway, once they differ from those that it has or the wait is over.
    ReadGatewayRoutes = "read_gateway_routes": Post Json "/api/gateway/routes" Gateway (gateways::RoutesRequest) -> gateways::GatewayRoutes;
    /// What came to a gateway, and which replicas it has no requests with any more.
    ReportGateway = "report_gateway": Post Json "/api/gateway/report" Gateway (gateways::GatewayReport) -> ();
    /// Whether a token opens the services of a project.
    CheckServiceToken = "check_service_token": Post Json "/api/gateway/check" Gateway (gateways::TokenCheckRequest) -> gateways::TokenCheck;
    /// A process of a gateway ends.
    LeaveGateway = "leave_gateway": Post Json "/api/gateway/leave" Gateway (gateways::LeaveRequest) -> ();

    /// What the project shares with others.
    ListExports = "list_exports": Post Json "/api/project/{project_name}/exports/list" ProjectUser (server::EmptyRequest) -> exports::Exports;
    /// What others share with the project.
    ListImports = "list_imports": Post Json "/api/project/{project_name}/imports/list" ProjectUser (server::EmptyRequest) -> exports::Imports;
    /// Templates the UI offers.
    ListTemplates = "list_templates": Post Json "/api/project/{project_name}/templates/list" ProjectUser (server::EmptyRequest) -> Vec<templates::Template>;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::table;
    use crate::operation::{Body, Method};

    #[test]
    fn ids_and_places_are_unique() {
        let table = table();
        let ids: BTreeSet<_> = table.iter().map(|entry| entry.id).collect();
        let places: BTreeSet<_> = table.iter().map(|entry| (entry.method.name(), entry.path)).collect();
        assert_eq!(ids.len(), table.len());
        assert_eq!(places.len(), table.len());
    }

    #[test]
    fn project_access_and_project_paths_go_together() {
        for entry in table() {
            let named = entry.parameters().next() == Some("project_name");
            assert_eq!(entry.access.in_project(), named, "{}", entry.id);
            assert_eq!(
                matches!(entry.body, Body::Query | Body::Text | Body::Events | Body::Stream),
                entry.method == Method::Get,
                "{}",
                entry.id
            );
        }
    }
}
