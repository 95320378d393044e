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
`access_to_objects_of_others_matches_the_rights_table` in `crates/server-tests/tests/it/auth_matrix.rs` check every cell.

*Own* and *of others* refer to the creator of the object: a run, a managed job, a fleet or a volume (and, for users and
members, to the caller). Managers and admins of the project and global admins may change objects that others created.
Operations with access `token` show and change what belongs to the caller: their own keys, lists of their projects,
projects that they administer. A user who is a member of no project has the rights of *no member* everywhere. In public
projects, users who are not members may also call `project-public` operations, and join and leave.

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
- Containers of the queue require the right to use it, which global admins grant.

`yes`: allowed. `own`: allowed for the caller's own objects. `–`: refused, with 401 without a token and with 403 otherwise.

| operation | access | anonymous | no member | user, own | user, of others | manager | project admin | global admin |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
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
    out
}

fn cells(entry: &Entry) -> Vec<&'static str> {
    let cell = |role, object| if entry.access.admits(role, object) { "yes" } else { "–" };
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
