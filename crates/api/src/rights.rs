//! Access rights of all operations, for `docs/reference/rights.md`.

use std::fmt::Write as _;

use crate::{
    operation::{CallerRole, Entry, Ownership},
    operations,
};

const HEAD: &str = "\
<!-- Generated from the operation table by the test `the_table_of_rights_is_the_generated_one`; do not edit. -->
# Rights

Each operation of the API has one word that says who may call it; the server checks it before it reads the request. This
table is written from the same code, and `every_operation_lets_in_those_it_names_and_nobody_else` and
`objects_of_others_are_for_those_whom_the_table_names` in `crates/server-tests/tests/it/auth_matrix.rs` try every cell.

*Own* and *of others* tell apart who made the object: a run, a managed job, a fleet or a volume (and, for users and
members, whether it is the caller). Managers and admins of the project and global admins may change what others made.
Operations for any `token` show and change what is the caller's: their own keys, lists of their projects, projects that they
administer. A member of no project has the rights of *no member* everywhere. Public projects also let those who are no members call
`project-public` operations, and join and leave.

Beside the role, three things are given one by one:

- **SSH fleets**: to create or change one takes the right to manage SSH fleets. Global admins have it; members have it
  when a global admin gave it to them (`windlass project members PROJECT --allow-ssh-fleets USER`). It comes with no role.
- **Backends**: fleets and volumes use the backends that were granted to their project
  (`windlass project grant-backend PROJECT BACKEND`). The first project has those of the server.
- **Secrets**: a run may use the secrets of its project that are for its creator
  (`windlass secret set NAME --for USER,…|managers|everyone`). Without `--for` they are for everyone in the project.

`yes`: may call it. `own`: for what is their own. `–`: is refused, with 401 without a token and with 403 otherwise.

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
        "\nOperations with the word `gateway` are for the processes of a gateway, which have a token of their own.\n",
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
