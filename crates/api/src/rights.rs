//! Access rights of all operations, for `docs/reference/rights.md`.

use std::fmt::Write as _;

use crate::{
    operation::{CallerRole, Entry, Ownership},
    operations,
};

const HEAD: &str = "\
<!-- Generated from the operation table by the test `stored_rights_table_matches_the_generated_one`; do not edit. -->
# Rights

Every operation of the API has an access level, which the server checks before it reads the request. This table is
generated from the same code; `every_operation_admits_only_the_callers_it_declares` and
`access_to_objects_of_others_matches_the_rights_table` in `crates/server-tests/tests/it/auth_matrix.rs`, and
`objects_of_a_caller_are_changed_only_by_those_whom_the_table_admits` and
`operations_across_projects_show_no_rows_of_other_projects` in `rights_rows.rs` there check the cells.

*Own* and *of others* refer to the creator of the object: a run, a managed job, a fleet or a volume (and, for users and
members, to the caller). Managers and admins of the project and global admins may change objects that others created.
Operations with access `token` admit every user, and their handlers narrow that to the caller's own keys, tokens,
sessions, views and archives, to projects that they administer, or to objects of projects of which they are members:
there, `own` of *no member* means that they get what is theirs elsewhere, and nothing of this project. A user who is a
member of no project has the rights of *no member* everywhere. In public projects, users who are not members may also
call `project-public` operations, and join and leave.

Three rights are granted separately from the role:

- **SSH fleets**: creating or changing one requires the right to manage SSH fleets. Global admins have it; members have it
  if a global admin granted it (`windlass project members PROJECT --allow-ssh-fleets USER`). No role includes it.
- **Backends**: fleets and volumes use the backends that were granted to their project
  (`windlass project grant-backend PROJECT BACKEND`). The first project has the backends of the server.
- **Secrets**: a run may use the secrets of its project that are available to its creator
  (`windlass secret set NAME --for USER,…|managers|everyone`). By default, a secret is available to everyone in the project.

Members see the runs of each other: configurations with the variables written in them, logs, events and metrics. A value
that others must not see belongs into a secret that is not available to them.

Some requests need more than their row says:

- Quotas of a whole project, its weight, and exports to all projects are for global admins; an export to a project
  requires an admin of both.
- Admins of a project are added and removed by its admins, not by managers.
- `class: urgent` of a run is for managers.
- A volume with a disk that a volume of another project has is registered by global admins.
- Containers of the queue require the right to use it, which global admins grant. So does the list of its dispatchers, and
  only global admins see on which machines these run.

`yes`: allowed. `own`: allowed for the caller's own objects. `–`: refused, with 401 without a token and with 403 otherwise;
objects of other users that are found by an id or a name of the caller (keys, tokens, sessions, archives) are not found.

| operation | access | anonymous | no member | user, own | user, of others | manager | project admin | global admin |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
";

const QUEUE_HEAD: &str = "
## Container queue

Operations of users, below `/arvados/v1/`; `queue_operations_match_the_rights_table` in `rights_rows.rs` checks every cell.
What is not found for a caller has status 404. Dispatchers lock containers and see all of them; an executor reports on
its own container and reads its secrets; the program in a container sees its own container and what it requested. Their
tokens are valid nowhere else.

| operation | anonymous | user without the right | user, own | user, of others | global admin |
| --- | --- | --- | --- | --- | --- |
";

const REVIEW: &str = "
## Review

| date | findings |
| --- | --- |
| 2026-11-19 | The rows of operations with access `token` said `yes` for objects of other users, which their handlers refuse; \
the table says so since, and a test checks it. The queue had no rows. No operation returns an existing token or the \
private key of another user, or an archive or a web session of one; a global admin can create a new token of a user. \
`init_repo` lets members of a project rename what kind a repository is; credentials are those of the caller, and content is \
named by its hash. Members of a project share logs, costs and files of its runs on purpose. |
";

/// Renders the whole page.
pub fn render_page() -> String {
    let mut out = HEAD.to_owned();
    for entry in operations::table() {
        let _ = writeln!(out, "| `{}` | {} | {} |", entry.id, entry.access.name(), cells(&entry).join(" | "));
    }
    out.push_str(
        "\nOperations with access `gateway` are for the processes of a gateway, which have their own token.\n",
    );
    out.push_str(QUEUE_HEAD);
    for operation in QUEUE_OPERATIONS {
        let cells: Vec<&str> = QueueRole::ALL.into_iter().flat_map(|role| operation.cells(role)).collect();
        let _ = writeln!(out, "| `{} {}` | {} |", operation.method, operation.path, cells.join(" | "));
    }
    out.push_str(REVIEW);
    out
}

/// Objects on which the handler of an operation with access `token` acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenRights {
    /// It has no object, or creates one for the caller.
    Anyone,
    /// Objects of the caller alone.
    Caller,
    /// Objects of the caller; a global admin has those of all users.
    CallerOrGlobalAdmin,
    /// Objects of the projects of which the caller is a member; a global admin has those of all projects.
    Members,
    /// Projects that the caller administers.
    ProjectAdmin,
}

impl TokenRights {
    /// Rights of an operation with access `token`; `None` for an unknown one.
    pub fn of(operation: &str) -> Option<Self> {
        Some(match operation {
            "read_schema" | "read_error_page" | "create_login_code" | "add_public_key" | "create_token"
            | "create_project" | "upload_archive" => Self::Anyone,
            "read_session" | "close_session" | "list_sessions" | "revoke_sessions" | "read_my_user"
            | "list_public_keys" | "delete_public_keys" | "list_tokens" | "revoke_tokens"
            | "read_archive" | "set_view" | "delete_view" => Self::Caller,
            "list_users" | "list_container_rows" | "list_dispatchers" => Self::CallerOrGlobalAdmin,
            "list_projects"
            | "list_projects_without_fleets"
            | "list_events"
            | "list_run_rows"
            | "list_managed_job_rows"
            | "list_instance_rows"
            | "read_summary"
            | "search_names"
            | "list_views"
            | "query_metrics"
            | "stream_blocks"
            | "stream_changes"
            | "list_queue"
            | "list_runs"
            | "list_fleets"
            | "list_instances"
            | "list_volumes"
            | "list_usage" => Self::Members,
            "delete_projects" => Self::ProjectAdmin,
            _ => return None,
        })
    }

    fn admits(self, role: CallerRole, object: Ownership) -> bool {
        let least = match (self, object) {
            (Self::Anyone, _) | (_, Ownership::Own) if self != Self::ProjectAdmin => CallerRole::Outsider,
            (Self::ProjectAdmin, _) => CallerRole::ProjectAdmin,
            (Self::CallerOrGlobalAdmin, _) => CallerRole::GlobalAdmin,
            (Self::Members, _) => CallerRole::User,
            (Self::Anyone | Self::Caller, _) => return false,
        };
        role >= least
    }
}

/// Returns whether the server lets a caller with this role apply the operation to their own object, or to one of another
/// user in the project.
pub fn admits(entry: &Entry, role: CallerRole, object: Ownership) -> bool {
    match TokenRights::of(entry.id) {
        Some(rights) => rights.admits(role, object),
        None => entry.access.admits(role, object),
    }
}

/// Caller of the container queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueRole {
    Anonymous,
    /// A user without the right to use the queue.
    WithoutRight,
    User,
    GlobalAdmin,
}

impl QueueRole {
    pub const ALL: [Self; 4] = [Self::Anonymous, Self::WithoutRight, Self::User, Self::GlobalAdmin];
}

/// Users whom an operation of the queue admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueAccess {
    /// Owners of the object, and global admins.
    Owner,
    /// Users with the right to use the queue, for their own requests.
    Submit,
    /// Global admins.
    GlobalAdmin,
    /// No user: only the executor of the container.
    Executor,
}

/// Operation of the container queue, which is not in the operation table because it has the API of Arvados.
#[derive(Clone, Copy, Debug)]
pub struct QueueOperation {
    pub method: &'static str,
    pub path: &'static str,
    pub access: QueueAccess,
}

/// Operations of the container queue for users.
pub const QUEUE_OPERATIONS: [QueueOperation; 13] = [
    QueueOperation { method: "GET", path: "container_requests", access: QueueAccess::Owner },
    QueueOperation { method: "GET", path: "containers", access: QueueAccess::Owner },
    QueueOperation { method: "GET", path: "logs", access: QueueAccess::Owner },
    QueueOperation { method: "POST", path: "container_requests", access: QueueAccess::Submit },
    QueueOperation { method: "GET", path: "container_requests/{request}", access: QueueAccess::Owner },
    QueueOperation { method: "PUT", path: "container_requests/{request}", access: QueueAccess::Owner },
    QueueOperation { method: "GET", path: "containers/{container}", access: QueueAccess::Owner },
    QueueOperation { method: "GET", path: "containers/{container}/output", access: QueueAccess::Owner },
    QueueOperation {
        method: "GET",
        path: "containers/{container}/secret_mounts",
        access: QueueAccess::Executor,
    },
    QueueOperation { method: "POST", path: "containers/{container}/output", access: QueueAccess::Executor },
    QueueOperation { method: "POST", path: "containers/{container}/lock", access: QueueAccess::GlobalAdmin },
    QueueOperation {
        method: "POST",
        path: "containers/{container}/unlock",
        access: QueueAccess::GlobalAdmin,
    },
    QueueOperation { method: "DELETE", path: "container_requests/{request}", access: QueueAccess::Owner },
];

impl QueueOperation {
    pub fn admits(&self, role: QueueRole, object: Ownership) -> bool {
        let own = object == Ownership::Own;
        match (self.access, role) {
            (_, QueueRole::Anonymous) | (QueueAccess::Executor, _) => false,
            (QueueAccess::Owner | QueueAccess::GlobalAdmin, QueueRole::GlobalAdmin) => true,
            (QueueAccess::GlobalAdmin, QueueRole::WithoutRight | QueueRole::User)
            | (QueueAccess::Submit, QueueRole::WithoutRight) => false,
            (QueueAccess::Owner, QueueRole::WithoutRight | QueueRole::User)
            | (QueueAccess::Submit, QueueRole::User | QueueRole::GlobalAdmin) => own,
        }
    }

    fn cells(&self, role: QueueRole) -> Vec<&'static str> {
        let cell = |object| if self.admits(role, object) { "yes" } else { "–" };
        let (own, foreign) = (cell(Ownership::Own), cell(Ownership::Foreign));
        match role {
            QueueRole::User => vec![own, foreign],
            QueueRole::Anonymous | QueueRole::WithoutRight | QueueRole::GlobalAdmin => {
                vec![if own == foreign { own } else { "own" }]
            }
        }
    }
}

fn cells(entry: &Entry) -> Vec<&'static str> {
    let cell = |role, object| if admits(entry, role, object) { "yes" } else { "–" };
    CallerRole::ALL
        .into_iter()
        .flat_map(|role| {
            let own = cell(role, Ownership::Own);
            let foreign = cell(role, Ownership::Foreign);
            match role {
                CallerRole::User => vec![own, foreign],
                CallerRole::Anonymous
                | CallerRole::Outsider
                | CallerRole::Manager
                | CallerRole::ProjectAdmin
                | CallerRole::GlobalAdmin => vec![if own == foreign { own } else { "own" }],
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Access;

    #[test]
    fn exactly_the_operations_with_access_token_have_rights_of_their_own() {
        for entry in operations::table() {
            let is_token = entry.access == Access::Token;
            assert_eq!(TokenRights::of(entry.id).is_some(), is_token, "{}", entry.id);
        }
    }
}
