//! Tables `identities` and `group_members`: users as an identity provider knows them, and memberships by its groups.

use uuid::Uuid;
use windlass_model::id::{ProjectId, UserId};

use super::{
    Change, Db, DbError, Val,
    users::{COLUMNS, User, WIDTH, exec},
};
use crate::params;

/// A user who logged in before.
#[derive(Debug)]
pub struct Identity {
    /// May be deleted or inactive.
    pub user: User,
    /// Token to which the sessions of the identity are bound.
    pub token: Uuid,
}

pub async fn find(db: &Db, issuer: &str, subject: &str) -> Result<Option<Identity>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS}, i.token_id FROM identities i JOIN users u ON u.id = i.user_id
         WHERE i.issuer = $1 AND i.subject = $2"
    );
    let Some(row) = db.query_opt(sql, params![issuer, subject]).await? else { return Ok(None) };
    Ok(Some(Identity { user: User::read(&row, 0)?, token: row.uuid(WIDTH)? }))
}

/// Records a login of a user. An identity moves to another user only if the previous one was deleted.
pub fn record_login(issuer: &str, subject: &str, user: UserId, token: Uuid) -> Change {
    exec(
        "INSERT INTO identities (issuer, subject, user_id, token_id, created_at, last_login_at)
         VALUES ($1, $2, $3, $4, $5, $5)
         ON CONFLICT (issuer, subject) DO UPDATE SET
            user_id = excluded.user_id, token_id = excluded.token_id, last_login_at = excluded.last_login_at",
        params![issuer, subject, user, token, Val::Now],
    )
}

/// Membership of a user in a project.
#[derive(Clone, Debug)]
pub struct JoinedProject {
    pub project: ProjectId,
    pub name: String,
    /// `None`: the user is not a member.
    pub role: Option<String>,
    /// True if a group gave it.
    pub by_group: bool,
}

/// Projects with these names, and those of which a user is a member by a group.
pub async fn joined(db: &Db, user: UserId, names: &[String]) -> Result<Vec<JoinedProject>, DbError> {
    let sql = "SELECT p.id, p.name, m.role, g.user_id IS NOT NULL
               FROM projects p
               LEFT JOIN members m ON m.project_id = p.id AND m.user_id = $1
               LEFT JOIN group_members g ON g.project_id = p.id AND g.user_id = $1
               WHERE NOT p.deleted
                 AND (g.user_id IS NOT NULL OR p.name IN (SELECT value FROM json_each(CAST($2 AS TEXT))))
               ORDER BY p.name";
    let rows = db.query(sql, params![user, Val::list(names)]).await?;
    rows.iter()
        .map(|row| {
            Ok(JoinedProject {
                project: row.id(0)?,
                name: row.text(1)?,
                role: row.opt_text(2)?,
                by_group: row.bool(3)?,
            })
        })
        .collect()
}

/// Lets a user join a project by a group.
pub fn join(project: ProjectId, user: UserId, role: &str, manages: bool) -> Vec<Change> {
    vec![
        exec(
            "INSERT INTO members (project_id, user_id, role, can_manage_ssh_fleets, can_manage_secrets, position)
             VALUES ($1, $2, $3, $4, $5, (SELECT coalesce(max(position), -1) + 1 FROM members WHERE project_id = $1))
             ON CONFLICT (project_id, user_id) DO NOTHING",
            params![project, user, role, false, manages],
        ),
        exec(
            "INSERT INTO group_members (project_id, user_id) VALUES ($1, $2)
             ON CONFLICT (project_id, user_id) DO NOTHING",
            params![project, user],
        ),
    ]
}

/// Changes the role of a member.
pub fn change_role(project: ProjectId, user: UserId, role: &str, manages: bool) -> Change {
    exec(
        "UPDATE members SET role = $3, can_manage_secrets = $4 WHERE project_id = $1 AND user_id = $2",
        params![project, user, role, manages],
    )
}

/// Ends a membership by a group.
pub fn leave(project: ProjectId, user: UserId) -> Vec<Change> {
    [
        "DELETE FROM members WHERE project_id = $1 AND user_id = $2",
        "DELETE FROM group_members WHERE project_id = $1 AND user_id = $2",
    ]
    .into_iter()
    .map(|sql| exec(sql, params![project, user]))
    .collect()
}
