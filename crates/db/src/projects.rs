//! Tables `projects` and `members`.

use std::collections::HashMap;

use windlass_model::{
    id::{GatewayId, ProjectId, UserId},
    time::Timestamp,
};

use super::{
    Change, Db, DbError, Row, Val,
    filter::{Filter, Page, contains_pattern},
    users::{self, User, exec},
};
use crate::params;

const COLUMNS: &str =
    "p.id, p.name, p.is_public, p.templates_repo, p.created_at, p.owner_id, p.default_image, p.usage_weight";
/// Number of [`COLUMNS`].
const WIDTH: usize = 8;

#[derive(Clone, Debug)]
pub struct Project {
    pub id: ProjectId,
    pub name: String,
    pub is_public: bool,
    pub templates_repo: Option<String>,
    pub created_at: Timestamp,
    pub owner: UserId,
    /// Image of runs that name none; `None`: the setting of the server.
    pub default_image: Option<String>,
    /// A project with twice the weight may use twice as much before others come first.
    pub usage_weight: i64,
}

impl Project {
    fn read(row: &Row) -> Result<Self, DbError> {
        Ok(Self {
            id: row.id(0)?,
            name: row.text(1)?,
            is_public: row.bool(2)?,
            templates_repo: row.opt_text(3)?,
            created_at: Timestamp(row.int(4)?),
            owner: row.id(5)?,
            default_image: row.opt_text(6)?,
            usage_weight: row.int(7)?,
        })
    }
}

/// Role and rights of a user in a project.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    pub role: String,
    pub can_manage_ssh_fleets: bool,
    pub can_manage_secrets: bool,
}

#[derive(Clone, Debug)]
pub struct Member {
    pub project: ProjectId,
    pub user: User,
    pub membership: Membership,
}

/// Finds a project by name, with the user's membership.
pub async fn find(
    db: &Db,
    name: &str,
    user: UserId,
) -> Result<Option<(Project, Option<Membership>)>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS}, m.role, m.can_manage_ssh_fleets, m.can_manage_secrets
         FROM projects p LEFT JOIN members m ON m.project_id = p.id AND m.user_id = $2
         WHERE p.name = $1 AND NOT p.deleted"
    );
    let Some(row) = db.query_opt(sql, params![name, user]).await? else { return Ok(None) };
    let membership = match row.opt_text(WIDTH)? {
        Some(role) => Some(Membership {
            role,
            can_manage_ssh_fleets: row.bool(WIDTH + 1)?,
            can_manage_secrets: row.bool(WIDTH + 2)?,
        }),
        None => None,
    };
    Ok(Some((Project::read(&row)?, membership)))
}

/// Projects that a caller can see.
#[derive(Clone, Copy, Debug)]
pub enum ProjectVisibility {
    All,
    /// Projects of which this user is a member.
    Joined(UserId),
    /// Those, and public ones.
    JoinedOrPublic(UserId),
}

#[derive(Clone, Copy, Debug)]
pub struct ProjectQuery<'a> {
    pub seen: ProjectVisibility,
    pub pattern: Option<&'a str>,
    /// Only projects of which the user of this name is a member.
    pub member: Option<&'a str>,
    pub without_fleets: bool,
    pub page: Page,
}

impl ProjectQuery<'_> {
    fn filter(&self) -> Filter {
        const JOINED: &str = "EXISTS (SELECT 1 FROM members m WHERE m.project_id = p.id AND m.user_id = ?)";
        let mut filter = Filter::new();
        filter.and("NOT p.deleted");
        match self.seen {
            ProjectVisibility::All => {}
            ProjectVisibility::Joined(user) => filter.is(JOINED, user),
            ProjectVisibility::JoinedOrPublic(user) => filter.is(&format!("(p.is_public OR {JOINED})"), user),
        }
        if let Some(pattern) = self.pattern {
            filter.is("lower(p.name) LIKE ? ESCAPE '!'", contains_pattern(pattern));
        }
        if let Some(name) = self.member {
            filter.is(
                "EXISTS (SELECT 1 FROM members m JOIN users u ON u.id = m.user_id
                         WHERE m.project_id = p.id AND u.name = ? AND NOT u.deleted)",
                name,
            );
        }
        if self.without_fleets {
            filter.and("NOT EXISTS (SELECT 1 FROM fleets f WHERE f.project_id = p.id AND NOT f.deleted)");
        }
        filter
    }
}

/// Projects by time of creation, and their total number.
pub async fn list(db: &Db, requested: &ProjectQuery<'_>) -> Result<(Vec<Project>, i64), DbError> {
    let (counted, params) = requested.filter().done();
    let count = db.query_opt(format!("SELECT count(*) FROM projects p{counted}"), params).await?;
    let mut filter = requested.filter();
    filter.after("p.created_at", "p.id", &requested.page);
    let (shown, params) = filter.done();
    let order = requested.page.order("p.created_at", "p.id");
    let rows = db.query(format!("SELECT {COLUMNS} FROM projects p{shown}{order}"), params).await?;
    let projects = rows.iter().map(Project::read).collect::<Result<_, _>>()?;
    Ok((projects, count.map_or(Ok(0), |row| row.int(0))?))
}

/// Projects that a user may see, with the user's role in each: all of them for a global admin, who is an admin
/// everywhere.
pub async fn visible(
    db: &Db,
    user: UserId,
    admin: bool,
) -> Result<Vec<(ProjectId, String, String)>, DbError> {
    let sql = if admin {
        "SELECT p.id, p.name, 'admin' FROM projects p WHERE NOT p.deleted AND $1 <> '' ORDER BY p.name"
    } else {
        "SELECT p.id, p.name, m.role FROM members m JOIN projects p ON p.id = m.project_id
         WHERE m.user_id = $1 AND NOT p.deleted ORDER BY p.name"
    };
    let rows = db.query(sql, params![user]).await?;
    rows.iter().map(|row| Ok((row.id(0)?, row.text(1)?, row.text(2)?))).collect()
}

/// Members of several projects, in the order of each project.
pub async fn members(db: &Db, projects: &[ProjectId]) -> Result<Vec<Member>, DbError> {
    let sql = format!(
        "SELECT {}, m.project_id, m.role, m.can_manage_ssh_fleets, m.can_manage_secrets
         FROM members m JOIN users u ON u.id = m.user_id
         WHERE m.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))
         ORDER BY m.project_id, m.position, u.name",
        users::COLUMNS
    );
    let rows = db.query(sql, params![Val::list(projects)]).await?;
    rows.iter()
        .map(|row| {
            Ok(Member {
                user: User::read(row, 0)?,
                project: row.id(users::WIDTH)?,
                membership: Membership {
                    role: row.text(users::WIDTH + 1)?,
                    can_manage_ssh_fleets: row.bool(users::WIDTH + 2)?,
                    can_manage_secrets: row.bool(users::WIDTH + 3)?,
                },
            })
        })
        .collect()
}

/// Returns whether a project has this name, ignoring case.
pub async fn is_name_taken(db: &Db, name: &str) -> Result<bool, DbError> {
    let sql = "SELECT 1 FROM projects WHERE lower(name) = lower($1) AND NOT deleted LIMIT 1";
    Ok(db.query_opt(sql, params![name]).await?.is_some())
}

/// Conflicts on `projects_name_key` if the name is in use.
pub fn create(
    id: ProjectId,
    name: &str,
    owner: UserId,
    is_public: bool,
    templates_repo: Option<&str>,
) -> Change {
    Change::Insert {
        table: "projects",
        values: vec![
            ("id", id.into()),
            ("name", name.into()),
            ("owner_id", owner.into()),
            ("is_public", is_public.into()),
            ("templates_repo", templates_repo.into()),
            ("created_at", Val::Now),
        ],
    }
}

/// Sets the key unless there is one: a key in use is never replaced.
pub fn set_first_key(id: ProjectId, public: &str, private_sealed: Vec<u8>) -> Change {
    exec(
        "UPDATE projects SET ssh_public_key = $2, ssh_private_key_sealed = $3
         WHERE id = $1 AND ssh_private_key_sealed IS NULL",
        params![id, public, private_sealed],
    )
}

/// Some of the projects without a key, with their names.
pub async fn list_without_key(db: &Db, limit: i64) -> Result<Vec<(ProjectId, String)>, DbError> {
    let sql = "SELECT id, name FROM projects WHERE ssh_private_key_sealed IS NULL AND NOT deleted
               ORDER BY id LIMIT $1";
    db.query(sql, params![limit]).await?.iter().map(|row| Ok((row.id(0)?, row.text(1)?))).collect()
}

pub async fn sealed_key(db: &Db, id: ProjectId) -> Result<Option<Vec<u8>>, DbError> {
    let sql = "SELECT ssh_private_key_sealed FROM projects WHERE id = $1";
    db.query_opt(sql, params![id]).await?.map_or(Ok(None), |row| row.opt_bytes(0))
}

/// Role of a user in a project, if any, and whether the user is a global admin.
pub async fn role(db: &Db, project: ProjectId, user: UserId) -> Result<(Option<String>, bool), DbError> {
    let sql = "SELECT m.role, u.global_role FROM users u
               LEFT JOIN members m ON m.user_id = u.id AND m.project_id = $1 WHERE u.id = $2";
    let Some(row) = db.query_opt(sql, params![project, user]).await? else { return Ok((None, false)) };
    Ok((row.opt_text(0)?, row.str(1)? == "admin"))
}

/// Stale if the user is not a member.
pub fn set_can_manage_ssh_fleets(project: ProjectId, user: UserId, given: bool) -> Change {
    Change::Exec {
        sql: "UPDATE members SET can_manage_ssh_fleets = $3 WHERE project_id = $1 AND user_id = $2".into(),
        params: params![project, user, given],
        expect: super::Expect::One,
    }
}

/// Adds a member, or changes the role. The right to manage SSH fleets is set separately, and is left unchanged.
pub fn set_member(project: ProjectId, user: UserId, membership: &Membership, position: i64) -> Change {
    exec(
        "INSERT INTO members (project_id, user_id, role, can_manage_ssh_fleets, can_manage_secrets, position)
         VALUES ($1, $2, $3, $4, $5, $6)
         ON CONFLICT (project_id, user_id) DO UPDATE SET
            role = excluded.role, can_manage_secrets = excluded.can_manage_secrets, position = excluded.position",
        params![
            project,
            user,
            &membership.role,
            membership.can_manage_ssh_fleets,
            membership.can_manage_secrets,
            position
        ],
    )
}

pub fn remove_members(project: ProjectId, users: &[UserId]) -> Change {
    exec(
        "DELETE FROM members
         WHERE project_id = $1 AND user_id IN (SELECT value FROM json_each(CAST($2 AS TEXT)))",
        params![project, Val::list(users)],
    )
}

pub fn update(
    id: ProjectId,
    is_public: bool,
    templates_repo: Option<&str>,
    default_image: Option<&str>,
    usage_weight: i64,
) -> Change {
    exec(
        "UPDATE projects SET is_public = $2, templates_repo = $3, default_image = $4, usage_weight = $5 WHERE id = $1",
        params![id, is_public, templates_repo, default_image, usage_weight],
    )
}

/// Hides the project, unless something in it is still active: then the whole unit is stale.
pub fn delete(id: ProjectId) -> Change {
    Change::Exec {
        sql: "UPDATE projects SET deleted = TRUE WHERE id = $1 AND NOT deleted
              AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.project_id = $1 AND NOT r.finished)
              AND NOT EXISTS (SELECT 1 FROM managed_jobs m WHERE m.project_id = $1 AND NOT m.finished)
              AND NOT EXISTS (SELECT 1 FROM fleets f WHERE f.project_id = $1 AND NOT f.deleted AND NOT f.finished)
              AND NOT EXISTS (SELECT 1 FROM volumes v WHERE v.project_id = $1 AND NOT v.deleted)
              AND NOT EXISTS (SELECT 1 FROM gateways g WHERE g.project_id = $1 AND NOT g.deleted)"
            .into(),
        params: params![id],
        expect: super::Expect::One,
    }
}

/// Projects of which the user is a member.
pub async fn list_joined(db: &Db, user: UserId) -> Result<Vec<ProjectId>, DbError> {
    let sql = "SELECT p.id FROM members m JOIN projects p ON p.id = m.project_id
               WHERE m.user_id = $1 AND NOT p.deleted";
    db.query(sql, params![user]).await?.iter().map(|row| row.id(0)).collect()
}

/// Names of projects, including deleted ones.
pub async fn names(db: &Db, ids: &[ProjectId]) -> Result<HashMap<ProjectId, String>, DbError> {
    let sql = "SELECT id, name FROM projects WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    db.query(sql, params![Val::list(ids)]).await?.iter().map(|row| Ok((row.id(0)?, row.text(1)?))).collect()
}

pub async fn default_gateway(db: &Db, id: ProjectId) -> Result<Option<GatewayId>, DbError> {
    let row = db.query_opt("SELECT default_gateway_id FROM projects WHERE id = $1", params![id]).await?;
    row.map_or(Ok(None), |row| row.opt_id(0))
}

pub fn set_default_gateway(id: ProjectId, gateway: GatewayId) -> Change {
    exec("UPDATE projects SET default_gateway_id = $2 WHERE id = $1", params![id, gateway])
}

/// Sets the default gateway unless there is an active one.
pub fn set_first_default_gateway(id: ProjectId, gateway: GatewayId) -> Change {
    exec(
        "UPDATE projects SET default_gateway_id = $2 WHERE id = $1 AND NOT EXISTS
            (SELECT 1 FROM gateways g WHERE g.id = projects.default_gateway_id AND NOT g.deleted
                AND g.delete_asked_at IS NULL)",
        params![id, gateway],
    )
}

pub async fn owned_count(db: &Db, owner: UserId) -> Result<i64, DbError> {
    let sql = "SELECT count(*) FROM projects WHERE owner_id = $1 AND NOT deleted";
    db.query_opt(sql, params![owner]).await?.map_or(Ok(0), |row| row.int(0))
}
