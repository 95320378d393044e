//! `windlass project`: projects of the server, their members, and the default project of commands.

use windlass_api::{
    backends::GrantRequest,
    operations::{
        AddMembers, CreateProject, DeleteProjects, GrantBackend, ListProjects, ReadProject, RemoveMembers,
        RevokeBackend, SetMemberRights, SetMembers, UpdateProject,
    },
    projects::{
        CreateRequest, DeleteRequest, ListRequest, Member, MemberRightsRequest, MemberSetting,
        MembersRequest, Project, ProjectList, ProjectRole, RemoveMembersRequest, UpdateRequest,
    },
    server::EmptyRequest,
};

use crate::{
    cli::{OutputArgs, ServerArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    home::Home,
    login,
    output::{
        self, ListView,
        detail_view::DetailView,
        format,
        table::{Cell, Table},
    },
};

const EXAMPLES: &str = "\
Examples:
  windlass project                                    list the projects that you can see; the default is marked
  windlass project add lab                            create a project, with you as its admin
  windlass project set-default lab                    use it in commands without `--project`
  windlass project members lab                        list its members
  windlass project members lab --set ada=manager --remove bob
  windlass project members lab --allow-ssh-fleets ada   for global admins only
  windlass project update lab --default-image debian:12   for runs that specify no image
  windlass project grant-backend lab local            for global admins only: allow the server's machine
  windlass project delete -y lab";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List projects
    #[command(after_help = "Examples:\n  windlass project list -o wide")]
    List,
    /// Show a project
    #[command(after_help = "Examples:\n  windlass project get lab")]
    Get {
        /// Name of the project
        #[arg(value_name = "PROJECT")]
        name: String,
    },
    /// Create a project
    #[command(after_help = "Examples:\n  windlass project add lab")]
    Add {
        /// Name of the project
        #[arg(value_name = "PROJECT")]
        name: String,
        /// Let all users of the server see and join the project
        #[arg(long)]
        public: bool,
    },
    /// Set the default project of commands
    #[command(after_help = "Examples:\n  windlass project set-default lab")]
    SetDefault {
        /// Name of the project
        #[arg(value_name = "PROJECT")]
        name: String,
    },
    /// List or change the members of a project
    #[command(
        after_help = "Examples:\n  windlass project members lab\n  windlass project members lab --set ada=manager --remove bob"
    )]
    Members {
        /// Name of the project; defaults to the current project
        #[arg(value_name = "PROJECT")]
        name: Option<String>,
        /// Assign a role (`user`, `manager` or `admin`) to a user; may be repeated
        #[arg(long, value_name = "USER=ROLE", value_parser = parse_role_assignment)]
        set: Vec<(String, ProjectRole)>,
        /// Remove a user from the project; may be repeated
        #[arg(long, value_name = "USER")]
        remove: Vec<String>,
        /// Let this member manage SSH fleets, as global admins do; may be repeated
        #[arg(long, value_name = "USER")]
        allow_ssh_fleets: Vec<String>,
        /// Stop letting this member manage SSH fleets; may be repeated
        #[arg(long, value_name = "USER")]
        deny_ssh_fleets: Vec<String>,
    },
    /// Change the settings of a project
    #[command(
        after_help = "Examples:\n  windlass project update lab --default-image debian:12\n  windlass project update lab --no-default-image --public false"
    )]
    Update {
        /// Name of the project; defaults to the current project
        #[arg(value_name = "PROJECT")]
        name: Option<String>,
        /// Image of runs that specify none, on instances that run only containers
        #[arg(long, value_name = "IMAGE")]
        default_image: Option<String>,
        /// Use the default image of the server again
        #[arg(long, conflicts_with = "default_image")]
        no_default_image: bool,
        /// Let all users of the server see and join the project
        #[arg(long, value_name = "BOOL")]
        public: Option<bool>,
        /// Weight of the project's usage of shared fleets: with 2 it may use twice as much as others before they come
        /// first
        #[arg(long, value_name = "NUMBER")]
        weight: Option<i64>,
    },
    /// Let a project use a backend of the server
    #[command(after_help = "Examples:\n  windlass project grant-backend lab local")]
    GrantBackend {
        /// Name of the project
        #[arg(value_name = "PROJECT")]
        name: String,
        /// Backend: `local` is the machine of the server, `slurm` the clusters of its dispatchers
        #[arg(value_name = "BACKEND")]
        backend: String,
    },
    /// Stop letting a project use a backend; its existing instances stay
    #[command(after_help = "Examples:\n  windlass project revoke-backend lab local")]
    RevokeBackend {
        /// Name of the project
        #[arg(value_name = "PROJECT")]
        name: String,
        /// Name of the backend
        #[arg(value_name = "BACKEND")]
        backend: String,
    },
    /// Delete projects
    #[command(after_help = "Examples:\n  windlass project delete -y lab")]
    Delete {
        /// Names of the projects
        #[arg(required = true, value_name = "PROJECT")]
        names: Vec<String>,
        /// Skip the confirmation prompt
        #[arg(short, long)]
        yes: bool,
    },
}

fn parse_role_assignment(text: &str) -> Result<(String, ProjectRole), String> {
    let (user, role) = text.split_once('=').ok_or("expected USER=ROLE")?;
    let role = match role {
        "user" => ProjectRole::User,
        "manager" => ProjectRole::Manager,
        "admin" => ProjectRole::Admin,
        _ => return Err("the role must be `user`, `manager` or `admin`".to_owned()),
    };
    if user.is_empty() { Err("expected USER=ROLE".to_owned()) } else { Ok((user.to_owned(), role)) }
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    context::with_context(&args.at, async |cx| match &args.action {
        None | Some(Action::List) => {
            let projects = list(cx).await?;
            let name = |project: &Project| project.project_name.clone();
            let none = "No projects. Run `windlass project add NAME` to create one.";
            ListView { project: None, kind: "projects", name, none }
                .print(&projects, format, |wide| table(&projects, &cx.project, wide))?;
            Ok(Exit::Done)
        }
        Some(Action::Get { name }) => {
            let project = find(cx, name).await?;
            output::print_one(format, &project, name, |_| facts(&project).print())?;
            Ok(Exit::Done)
        }
        Some(Action::Add { name, public }) => {
            let request =
                CreateRequest { project_name: name.clone(), is_public: *public, templates_repo: None };
            let project = cx.call::<CreateProject>(&request).await?;
            let message = format!(
                "Created project `{name}`. Run `windlass project set-default {name}` to make it your default."
            );
            output::print_one(format, &project, name, |_| output::print_message(&message))?;
            Ok(Exit::Done)
        }
        Some(Action::SetDefault { name }) => {
            let project = find(cx, name).await?;
            let file = login::set_default_project(&Home::find()?, name)?;
            let message = format!("Your default project is now `{name}` (written to {}).", file.display());
            output::print_one(format, &project, name, |_| output::print_message(&message))?;
            Ok(Exit::Done)
        }
        Some(Action::Update { name, default_image, no_default_image, public, weight }) => {
            let name = name.as_deref().unwrap_or(&cx.project);
            let request = UpdateRequest {
                is_public: *public,
                default_image: default_image.clone(),
                reset_default_image: *no_default_image,
                weight: *weight,
                ..UpdateRequest::default()
            };
            let project = cx.in_project(name).call::<UpdateProject>(&request).await?;
            let text = format!("Updated project `{name}`.");
            output::print_one(format, &project, name, |_| output::print_message(&text))?;
            Ok(Exit::Done)
        }
        Some(Action::GrantBackend { name, backend }) => {
            let request = GrantRequest { project_name: name.clone(), backend: backend.clone() };
            let project = cx.call::<GrantBackend>(&request).await?;
            let message = format!("Fleets of `{name}` may now use `{backend}`.");
            output::print_one(format, &project, name, |_| output::print_message(&message))?;
            Ok(Exit::Done)
        }
        Some(Action::RevokeBackend { name, backend }) => {
            let request = GrantRequest { project_name: name.clone(), backend: backend.clone() };
            let project = cx.call::<RevokeBackend>(&request).await?;
            let message =
                format!("Fleets of `{name}` may no longer use `{backend}`. Existing instances are kept.");
            output::print_one(format, &project, name, |_| output::print_message(&message))?;
            Ok(Exit::Done)
        }
        Some(Action::Members { name, set, remove, allow_ssh_fleets, deny_ssh_fleets }) => {
            let name = name.as_deref().unwrap_or(&cx.project);
            let mut project = change(cx, name, set, remove).await?;
            let given = allow_ssh_fleets.iter().map(|user| (user, true));
            for (user, can) in given.chain(deny_ssh_fleets.iter().map(|user| (user, false))) {
                project = cx
                    .call::<SetMemberRights>(&MemberRightsRequest {
                        project_name: name.to_owned(),
                        username: user.clone(),
                        can_manage_ssh_fleets: can,
                    })
                    .await?;
                let may = if can { "may manage SSH fleets" } else { "may no longer manage SSH fleets" };
                output::print_message(&format!("`{user}` {may} in `{name}`."));
            }
            let who = |member: &Member| member.user.username.clone();
            let members = &project.members;
            ListView { project: Some(name), kind: "members", name: who, none: "No members." }.print(
                members,
                format,
                |wide| members_table(members, wide),
            )?;
            Ok(Exit::Done)
        }
        Some(Action::Delete { names, yes }) => {
            let request = DeleteRequest { projects_names: names.clone() };
            let call = async || cx.call::<DeleteProjects>(&request).await.map(drop);
            output::delete(names, *yes, "Deleted", async |name| find(cx, name).await, call).await
        }
    })
}

async fn list(cx: &Context) -> Result<Vec<Project>, CliError> {
    Ok(match cx.call::<ListProjects>(&ListRequest { ascending: true, ..ListRequest::default() }).await? {
        ProjectList::Plain(projects) | ProjectList::Counted { projects, .. } => projects,
    })
}

/// Reads another project. The error lists the existing projects.
async fn find(cx: &Context, name: &str) -> Result<Project, CliError> {
    cx.in_project(name).call::<ReadProject>(&EmptyRequest {}).await
}

async fn change(
    cx: &Context,
    name: &str,
    set: &[(String, ProjectRole)],
    remove: &[String],
) -> Result<Project, CliError> {
    let cx = cx.in_project(name);
    let mut project = cx.call::<ReadProject>(&EmptyRequest {}).await?;
    if !set.is_empty() {
        let is_member = |user: &str| project.members.iter().any(|member| member.user.username == user);
        let setting = |(user, role): &(String, ProjectRole)| MemberSetting {
            username: user.clone(),
            project_role: *role,
        };
        project = if set.iter().any(|(user, _)| is_member(user)) {
            // The API replaces the whole list of members.
            let kept =
                project.members.iter().filter(|old| !set.iter().any(|(user, _)| *user == old.user.username));
            let kept = kept.map(|old| MemberSetting {
                username: old.user.username.clone(),
                project_role: old.project_role,
            });
            let members = kept.chain(set.iter().map(setting)).collect();
            cx.call::<SetMembers>(&MembersRequest { members }).await?
        } else {
            cx.call::<AddMembers>(&MembersRequest { members: set.iter().map(setting).collect() }).await?
        };
    }
    if !remove.is_empty() {
        project = cx.call::<RemoveMembers>(&RemoveMembersRequest { usernames: remove.to_vec() }).await?;
    }
    if !set.is_empty() || !remove.is_empty() {
        output::print_message(&format!("Changed the members of `{name}`."));
    }
    Ok(project)
}

const fn parse_role(role: ProjectRole) -> &'static str {
    match role {
        ProjectRole::User => "user",
        ProjectRole::Manager => "manager",
        ProjectRole::Admin => "admin",
    }
}

fn facts(project: &Project) -> DetailView {
    let mut facts = DetailView::new();
    facts.add("Name", &project.project_name);
    facts.add("Owner", &project.owner.username);
    facts.add("Public", if project.is_public { "yes" } else { "no" });
    let members = project.members.iter();
    let members: Vec<String> = members
        .map(|member| format!("{} ({})", member.user.username, parse_role(member.project_role)))
        .collect();
    facts.add("Members", members.join("\n"));
    if let Some(image) = &project.default_image {
        facts.add("Default image", image);
    }
    if project.weight != 1 {
        facts.add("Weight", project.weight.to_string());
    }
    facts.add("Backends", project.granted_backends.join(", "));
    facts.add("Created", project.created_at.map(|time| time.to_string()).unwrap_or_default());
    facts.add("Id", project.project_id.to_string());
    facts
}

fn table(projects: &[Project], default: &str, wide: bool) -> Table {
    let now = format::now();
    let mut head = vec!["PROJECT", "OWNER", "MEMBERS", "DEFAULT"];
    if wide {
        head.extend(["PUBLIC", "CREATED", "ID"]);
    }
    let mut table = Table::new(head);
    for project in projects {
        let mut row: Vec<Cell> = vec![
            project.project_name.as_str().into(),
            project.owner.username.as_str().into(),
            project.members.len().to_string().into(),
            (if project.project_name == default { "yes" } else { "" }).into(),
        ];
        if wide {
            row.extend([
                (if project.is_public { "yes" } else { "" }).into(),
                project.created_at.map(|time| format::ago(time, now)).unwrap_or_default().into(),
                project.project_id.to_string().into(),
            ]);
        }
        table.row(row);
    }
    table
}

fn members_table(members: &[Member], wide: bool) -> Table {
    let mut table = Table::new(if wide {
        vec!["USER", "ROLE", "EMAIL", "SECRETS", "SSH FLEETS"]
    } else {
        vec!["USER", "ROLE"]
    });
    for member in members {
        let mut row: Vec<Cell> =
            vec![member.user.username.as_str().into(), parse_role(member.project_role).into()];
        if wide {
            let secrets = if member.permissions.can_manage_secrets { "yes" } else { "" };
            let fleets = if member.permissions.can_manage_ssh_fleets { "yes" } else { "" };
            row.extend([member.user.email.clone().unwrap_or_default().into(), secrets.into(), fleets.into()]);
        }
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::{ProjectRole, parse_role_assignment};

    #[test]
    fn a_role_assignment_is_parsed_as_user_equals_role() {
        assert_eq!(parse_role_assignment("ada=manager"), Ok(("ada".to_owned(), ProjectRole::Manager)));
        for wrong in ["ada", "=user", "ada=", "ada=king"] {
            assert!(parse_role_assignment(wrong).is_err(), "{wrong}");
        }
    }
}
