//! Projects and their members.

use std::collections::{BTreeMap, BTreeSet};

use windlass_api::projects::{self as wire, ProjectRole};
use windlass_model::{
    event::Entity,
    id::{ProjectId, UserId},
    plan::execution_mode::PLAIN_PROCESS_IMAGE,
};
use windlass_registry::ImageName;

use super::{grants, names, project_keys, users};
use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    db::{
        Change, Page, Unit, WriteOutcome, backends,
        projects::{self, Member, Membership, Project, ProjectQuery, ProjectVisibility},
        users as user_rows,
    },
    error::{Error, Result},
    events::{EventSubject, note},
    limits::{self, limit_hint},
};

const LIST_MAX: i64 = 2000;
const MEMBERS_MAX: usize = 1000;

pub async fn list(app: &App, caller: &Caller, requested: wire::ListRequest) -> Result<wire::ProjectList> {
    let seen = match (caller.user.admin, requested.include_not_joined) {
        (true, true) => ProjectVisibility::All,
        (false, true) => ProjectVisibility::JoinedOrPublic(caller.user.id),
        (_, false) => ProjectVisibility::Joined(caller.user.id),
    };
    let page = Page {
        time: requested.prev_created_at,
        id: requested.prev_id,
        limit: requested.limit.clamp(0, LIST_MAX),
        ascending: requested.ascending,
        ..Page::default()
    };
    let requested_rows = ProjectQuery {
        seen,
        pattern: requested.name_pattern.as_deref(),
        member: requested.username.as_deref(),
        without_fleets: false,
        page,
    };
    let (rows, count) = projects::list(app.db(), &requested_rows).await?;
    let projects = to_wire(app, rows).await?;
    if requested.return_total_count {
        return Ok(wire::ProjectList::Counted { total_count: Some(count), projects });
    }
    Ok(wire::ProjectList::Plain(projects))
}

pub async fn list_without_fleets(app: &App, caller: &Caller) -> Result<Vec<wire::Project>> {
    let page = Page { limit: LIST_MAX, ..Page::default() };
    let seen = ProjectVisibility::Joined(caller.user.id);
    let requested = ProjectQuery { seen, pattern: None, member: None, without_fleets: true, page };
    let (rows, _) = projects::list(app.db(), &requested).await?;
    to_wire(app, rows).await
}

/// Adds members, owners and grants: three queries for any number of projects.
async fn to_wire(app: &App, rows: Vec<Project>) -> Result<Vec<wire::Project>> {
    let ids: Vec<ProjectId> = rows.iter().map(|project| project.id).collect();
    let mut members = BTreeMap::<ProjectId, Vec<Member>>::new();
    for member in projects::members(app.db(), &ids).await? {
        members.entry(member.project).or_default().push(member);
    }
    let mut granted = BTreeMap::<ProjectId, Vec<String>>::new();
    for (project, kind) in backends::list_kinds(app.db(), &ids).await? {
        granted.entry(project).or_default().push(kind);
    }
    let owners: BTreeSet<UserId> = rows.iter().map(|project| project.owner).collect();
    let owners: Vec<UserId> = owners.into_iter().collect();
    let owners: BTreeMap<UserId, _> =
        user_rows::by_ids(app.db(), &owners).await?.into_iter().map(|user| (user.id, user)).collect();
    rows.into_iter()
        .map(|project| {
            let owner = owners.get(&project.owner).ok_or_else(|| Error::absent("Owner"))?;
            Ok(wire::Project {
                project_id: project.id.0,
                owner: users::to_wire(owner),
                created_at: Some(project.created_at),
                backends: Vec::new(),
                members: members.remove(&project.id).unwrap_or_default().iter().map(member_to_wire).collect(),
                is_public: project.is_public,
                templates_repo: project.templates_repo,
                granted_backends: granted.remove(&project.id).unwrap_or_default(),
                default_image: project.default_image,
                weight: project.usage_weight,
                project_name: project.name,
            })
        })
        .collect()
}

/// Converts a member with the rights that it has, which a global admin has everywhere.
fn member_to_wire(member: &Member) -> wire::Member {
    wire::Member {
        user: users::to_wire(&member.user),
        project_role: role(&member.membership),
        permissions: wire::MemberPermissions {
            can_manage_ssh_fleets: member.user.admin || member.membership.can_manage_ssh_fleets,
            can_manage_secrets: member.user.admin || member.membership.can_manage_secrets,
        },
    }
}

fn role(membership: &Membership) -> ProjectRole {
    parse_role(&membership.role)
}

pub(crate) fn parse_role(word: &str) -> ProjectRole {
    match word {
        "admin" => ProjectRole::Admin,
        "manager" => ProjectRole::Manager,
        _ => ProjectRole::User,
    }
}

/// Rights that a role includes.
pub(crate) fn membership(role: ProjectRole) -> Membership {
    let (word, manages) = match role {
        ProjectRole::Admin => ("admin", true),
        ProjectRole::Manager => ("manager", true),
        ProjectRole::User => ("user", false),
    };
    // No role includes the right to manage SSH fleets: global admins grant it.
    Membership { role: word.to_owned(), can_manage_ssh_fleets: false, can_manage_secrets: manages }
}

pub async fn read(app: &App, scope: &ProjectScope) -> Result<wire::Project> {
    reload(app, &scope.project.name, scope.caller.user.id).await
}

/// Reads the project, bypassing all caches.
pub(super) async fn reload(app: &App, name: &str, user: UserId) -> Result<wire::Project> {
    let found = projects::find(app.db(), name, user).await?;
    let (project, _) = found.ok_or(Error::Unknown { msg: "Project not found" })?;
    to_wire(app, vec![project]).await?.pop().ok_or(Error::Unknown { msg: "Project not found" })
}

pub async fn create(app: &App, caller: &Caller, requested: wire::CreateRequest) -> Result<wire::Project> {
    let owned = projects::owned_count(app.db(), caller.user.id).await?;
    let most = app.settings().limits.projects;
    if !caller.user.admin && owned >= most {
        let more = limit_hint(limits::PROJECTS_MAX);
        return Err(Error::refused(format!(
            "you own {owned} projects, and at most {most} are allowed; {more}"
        )));
    }
    let (name, templates) = (&requested.project_name, requested.templates_repo.as_deref());
    add(app, caller.user.id, name, requested.is_public, templates).await?;
    reload(app, name, caller.user.id).await
}

/// Adds a project whose owner is its first admin. It may use no backend before one is granted to it.
pub async fn add(
    app: &App,
    owner: UserId,
    name: &str,
    is_public: bool,
    templates_repo: Option<&str>,
) -> Result<ProjectId> {
    let id = ProjectId(app.db().new_id()?);
    insert(app, owner, projects::create(id, name, owner, is_public, templates_repo), id, name, Vec::new())
        .await
}

/// Adds the project that every server has. It may use the server's backends.
pub(super) async fn add_first(app: &App, owner: UserId, name: &str) -> Result<ProjectId> {
    let id = ProjectId(app.db().new_id()?);
    let granted = grants::first_grants(app, id)?;
    insert(app, owner, projects::create(id, name, owner, false, None), id, name, granted).await
}

async fn insert(
    app: &App,
    owner: UserId,
    created: Change,
    id: ProjectId,
    name: &str,
    granted: Vec<Change>,
) -> Result<ProjectId> {
    names::check_project(name)?;
    if projects::is_name_taken(app.db(), name).await? {
        return Err(Error::exists("Project"));
    }
    let about = EventSubject { entity: Entity::Project, id: id.0, name, project: Some(id) };
    let unit = Unit::new()
        .and([
            created,
            projects::set_member(id, owner, &membership(ProjectRole::Admin), 0),
            project_keys::generate(app, id, name)?,
        ])
        .and(granted)
        .and(note(app.db(), Some(owner), &about, "created", "Project created".into())?);
    match app.db().write(unit).await {
        Ok(written) => written.done()?,
        Err(error) if error.is_conflict_on("projects_name_key") => return Err(Error::exists("Project")),
        Err(error) => return Err(error.into()),
    };
    app.access().forget();
    Ok(id)
}

/// Deletes all of them or none.
pub async fn delete(app: &App, caller: &Caller, names: &[String]) -> Result<()> {
    let mut unit = Unit::new();
    for name in names.iter().collect::<BTreeSet<_>>() {
        let found = projects::find(app.db(), name, caller.user.id).await?;
        let (project, member) = found.ok_or_else(Error::denied)?;
        if !caller.user.admin && member.is_none_or(|member| role(&member) != ProjectRole::Admin) {
            return Err(Error::denied());
        }
        let about = EventSubject {
            entity: Entity::Project,
            id: project.id.0,
            name: &project.name,
            project: Some(project.id),
        };
        unit = unit.and([projects::delete(project.id)]).and(note(
            app.db(),
            Some(caller.user.id),
            &about,
            "deleted",
            "Project deleted".into(),
        )?);
    }
    let written = app.db().write(unit).await?;
    app.access().forget();
    match written {
        WriteOutcome::Done { .. } => Ok(()),
        WriteOutcome::Stale { .. } => {
            Err(Error::refused("a project with active runs, fleets, volumes or gateways cannot be deleted"))
        }
    }
}

const WEIGHT_MAX: i64 = 1_000;

/// Rejects a default image that no registry can have.
fn check_default_image(image: String) -> Result<String> {
    match image.parse::<ImageName>() {
        Ok(_) if image == PLAIN_PROCESS_IMAGE => {
            Err(Error::field("default_image", "must name an image; reset it to have none"))
        }
        Ok(_) => Ok(image),
        Err(error) => Err(Error::field("default_image", error.to_string())),
    }
}

pub async fn update(
    app: &App,
    scope: &ProjectScope,
    requested: wire::UpdateRequest,
) -> Result<wire::Project> {
    let templates = match (requested.reset_templates_repo, requested.templates_repo) {
        (true, _) => None,
        (false, Some(repo)) => Some(repo),
        (false, None) => scope.project.templates_repo.clone(),
    };
    let is_public = requested.is_public.unwrap_or(scope.project.is_public);
    let default_image = match (requested.reset_default_image, requested.default_image) {
        (true, Some(_)) => {
            return Err(Error::field("default_image", "cannot be set and reset at the same time"));
        }
        (true, None) => None,
        (false, Some(image)) => Some(check_default_image(image)?),
        (false, None) => scope.project.default_image.clone(),
    };
    let weight = match requested.weight {
        None => scope.project.usage_weight,
        Some(_) if !scope.caller.user.admin => {
            return Err(Error::refused("only a global admin can change the weight of a project"));
        }
        Some(weight) if (1..=WEIGHT_MAX).contains(&weight) => weight,
        Some(_) => return Err(Error::field("weight", "must be from 1 to 1000")),
    };
    let change =
        projects::update(scope.project.id, is_public, templates.as_deref(), default_image.as_deref(), weight);
    write(app, scope, vec![change], "updated", "Project updated".into()).await
}

pub async fn set_members(
    app: &App,
    scope: &ProjectScope,
    requested: wire::MembersRequest,
) -> Result<wire::Project> {
    let wanted = resolve(app, &requested.members).await?;
    let before = projects::members(app.db(), &[scope.project.id]).await?;
    check_admins(scope, &before, &wanted)?;
    let gone: Vec<UserId> =
        before.iter().map(|member| member.user.id).filter(|id| !wanted.contains_key(id)).collect();
    let mut changes = vec![projects::remove_members(scope.project.id, &gone)];
    changes.extend(member_changes(scope.project.id, &wanted));
    write(app, scope, changes, "members_set", "Project members set".into()).await
}

pub async fn add_members(
    app: &App,
    scope: &ProjectScope,
    requested: wire::MembersRequest,
) -> Result<wire::Project> {
    let wanted = resolve(app, &requested.members).await?;
    if scope.role() < Some(ProjectRole::Manager) {
        let own = scope.caller.user.id;
        let joins = scope.project.is_public && scope.role().is_none();
        let only_self =
            wanted.len() == 1 && wanted.get(&own).is_some_and(|(_, role)| *role == ProjectRole::User);
        if !joins || !only_self {
            return Err(Error::denied());
        }
    } else {
        let before = projects::members(app.db(), &[scope.project.id]).await?;
        let mut after: RequestedMembers = before
            .iter()
            .enumerate()
            .map(|(at, member)| (member.user.id, (at, role(&member.membership))))
            .collect();
        after.extend(wanted.iter().map(|(id, (at, role))| (*id, (before.len() + at, *role))));
        check_admins(scope, &before, &after)?;
    }
    let changes = member_changes(scope.project.id, &wanted).collect();
    write(app, scope, changes, "members_added", "Project members added".into()).await
}

/// Sets rights. Only for global admins: users who create a project could otherwise grant the right to themselves.
pub async fn set_rights(
    app: &App,
    caller: &Caller,
    requested: &wire::MemberRightsRequest,
) -> Result<wire::Project> {
    let found = projects::find(app.db(), &requested.project_name, caller.user.id).await?;
    let (project, _) = found.ok_or_else(|| Error::absent("Project"))?;
    let user =
        user_rows::by_name(app.db(), &requested.username).await?.ok_or_else(|| Error::absent("User"))?;
    let about = EventSubject {
        entity: Entity::Project,
        id: project.id.0,
        name: &project.name,
        project: Some(project.id),
    };
    let given = requested.can_manage_ssh_fleets;
    let message = match given {
        true => format!("{} may manage SSH fleets", user.name),
        false => format!("{} may no longer manage SSH fleets", user.name),
    };
    let unit = Unit::new().and([projects::set_can_manage_ssh_fleets(project.id, user.id, given)]).and(note(
        app.db(),
        Some(caller.user.id),
        &about,
        "rights_set",
        message,
    )?);
    match app.db().write(unit).await? {
        WriteOutcome::Done { .. } => {
            app.access().forget();
            reload(app, &project.name, caller.user.id).await
        }
        WriteOutcome::Stale { .. } => Err(Error::absent("Member")),
    }
}

pub async fn remove_members(
    app: &App,
    scope: &ProjectScope,
    requested: wire::RemoveMembersRequest,
) -> Result<wire::Project> {
    let before = projects::members(app.db(), &[scope.project.id]).await?;
    let mut gone = Vec::new();
    for name in requested.usernames.iter().collect::<BTreeSet<_>>() {
        let member = before.iter().find(|member| &member.user.name == name);
        gone.push(member.ok_or_else(|| Error::absent("Member"))?.user.id);
    }
    let leaves = gone == [scope.caller.user.id];
    if scope.role() < Some(ProjectRole::Manager) && !leaves {
        return Err(Error::denied());
    }
    let after: RequestedMembers = before
        .iter()
        .enumerate()
        .filter(|(_, member)| !gone.contains(&member.user.id))
        .map(|(at, member)| (member.user.id, (at, role(&member.membership))))
        .collect();
    if leaves {
        require_remaining_admin(&after)?
    } else {
        check_admins(scope, &before, &after)?
    }
    let change = projects::remove_members(scope.project.id, &gone);
    write(app, scope, vec![change], "members_removed", "Project members removed".into()).await
}

/// Users with their position in the list and their role.
type RequestedMembers = BTreeMap<UserId, (usize, ProjectRole)>;

async fn resolve(app: &App, settings: &[wire::MemberSetting]) -> Result<RequestedMembers> {
    if settings.len() > MEMBERS_MAX {
        return Err(Error::refused("too many members"));
    }
    let names: Vec<String> = settings.iter().map(|setting| setting.username.clone()).collect();
    let users = user_rows::by_names(app.db(), &names).await?;
    let mut wanted = RequestedMembers::new();
    for (at, setting) in settings.iter().enumerate() {
        let user = users.iter().find(|user| user.name == setting.username);
        wanted.insert(user.ok_or_else(|| Error::absent("User"))?.id, (at, setting.project_role));
    }
    Ok(wanted)
}

fn member_changes(project: ProjectId, wanted: &RequestedMembers) -> impl Iterator<Item = Change> {
    wanted.iter().map(move |(user, (at, role))| {
        projects::set_member(project, *user, &membership(*role), i64::try_from(*at).unwrap_or(i64::MAX))
    })
}

/// Checks that only admins change who is an admin, and that one always remains.
fn check_admins(scope: &ProjectScope, before: &[Member], after: &RequestedMembers) -> Result<()> {
    let had: BTreeSet<UserId> = before
        .iter()
        .filter(|member| role(&member.membership) == ProjectRole::Admin)
        .map(|member| member.user.id)
        .collect();
    let have: BTreeSet<UserId> =
        after.iter().filter(|(_, (_, role))| *role == ProjectRole::Admin).map(|(id, _)| *id).collect();
    if had != have && scope.role() != Some(ProjectRole::Admin) {
        return Err(Error::denied());
    }
    require_remaining_admin(after)
}

fn require_remaining_admin(after: &RequestedMembers) -> Result<()> {
    if after.values().any(|(_, role)| *role == ProjectRole::Admin) {
        return Ok(());
    }
    Err(Error::refused("a project must have an admin"))
}

async fn write(
    app: &App,
    scope: &ProjectScope,
    changes: Vec<Change>,
    reason: &str,
    message: String,
) -> Result<wire::Project> {
    let project = &scope.project;
    let by = scope.caller.user.id;
    let about = EventSubject {
        entity: Entity::Project,
        id: project.id.0,
        name: &project.name,
        project: Some(project.id),
    };
    let unit = Unit::new().and(changes).and(note(app.db(), Some(by), &about, reason, message)?);
    app.db().write(unit).await?.done()?;
    app.access().forget();
    reload(app, &project.name, by).await
}
