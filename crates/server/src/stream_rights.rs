//! Rights of open streams: logs, connections to jobs, WebSockets, requests to services.
//!
//! A stream registers what its rights depend on. One statement every `rights_poll_interval`, for all streams of this
//! process, reads the state of all of it from the database. A stream whose basis changed is woken, checks its rights in
//! full, and ends if they are gone. So a change that any server makes takes effect here within that interval
//! plus the time of a statement.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::sleep};
use windlass_model::id::UserId;

use crate::{
    app::App,
    db::tokens::{self, AccessState},
};

/// Rows on which the rights of a stream depend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RightsBasis {
    pub(crate) user: UserId,
    /// Hash of the presented token, as stored for users.
    pub(crate) token_hash: String,
    /// Name of the presented token, if it is a token of the queue.
    pub(crate) queue_token: Option<String>,
    pub(crate) project: Option<String>,
}

/// The open streams of this process.
#[derive(Debug, Default)]
pub(crate) struct StreamRights(Mutex<RegistryState>);

#[derive(Debug, Default)]
struct RegistryState {
    streams: HashMap<u64, RegisteredStream>,
    next: u64,
    /// True while `poll_rights` runs.
    is_watched: bool,
}

#[derive(Debug)]
struct RegisteredStream {
    ground: RightsBasis,
    /// State at the last check; `None` before the first one, which always wakes the stream.
    stood: Option<Vec<String>>,
    wake: Arc<Notify>,
}

/// Registers a stream until it is dropped.
pub(crate) struct StreamRegistration {
    app: App,
    id: u64,
    wake: Arc<Notify>,
}

impl StreamRights {
    /// Registers a stream, and starts `poll_rights` if it is not running.
    pub(crate) fn register(app: &App, ground: RightsBasis) -> StreamRegistration {
        let wake = Arc::new(Notify::new());
        let mut state = app.stream_rights().0.lock();
        let id = state.next;
        state.next += 1;
        state.streams.insert(id, RegisteredStream { ground, stood: None, wake: Arc::clone(&wake) });
        if !std::mem::replace(&mut state.is_watched, true) {
            tokio::spawn(poll_rights(app.clone()));
        }
        drop(state);
        StreamRegistration { app: app.clone(), id, wake }
    }

    /// The rows to query. Returns `None` and stops the polling when no stream is open.
    fn wanted(&self) -> Option<RightsQuery> {
        let mut state = self.0.lock();
        if state.streams.is_empty() {
            state.is_watched = false;
            return None;
        }
        let mut wanted = RightsQuery::default();
        for RegisteredStream { ground, .. } in state.streams.values() {
            wanted.hashes.insert(ground.token_hash.clone());
            wanted.queue_tokens.extend(ground.queue_token.clone());
            if let Some(project) = &ground.project {
                wanted.projects.insert(project.clone());
                wanted.users.insert(ground.user);
            }
        }
        Some(wanted)
    }

    /// Wakes the streams whose basis changed.
    fn notify_changed(&self, app: &App, found: &[AccessState]) {
        let mut woken = Vec::new();
        for stream in self.0.lock().streams.values_mut() {
            let stands = stream.ground.stands(found);
            if stream.stood.as_ref() != Some(&stands) {
                stream.stood = Some(stands);
                woken.push(Arc::clone(&stream.wake));
            }
        }
        if woken.is_empty() {
            return;
        }
        // The cached access decisions may be based on what just changed.
        app.access().forget();
        for wake in woken {
            wake.notify_one();
        }
    }
}

#[derive(Debug, Default)]
struct RightsQuery {
    hashes: BTreeSet<String>,
    queue_tokens: BTreeSet<String>,
    projects: BTreeSet<String>,
    users: BTreeSet<UserId>,
}

impl RightsBasis {
    /// State of the basis, in a stable order.
    fn stands(&self, found: &[AccessState]) -> Vec<String> {
        let user = self.user.to_string();
        let mut stands: Vec<String> = found
            .iter()
            .filter(|row| match row.kind.as_str() {
                "token" => row.key == self.token_hash,
                "queue" => Some(&row.key) == self.queue_token.as_ref(),
                "project" => Some(&row.key) == self.project.as_ref(),
                "member" => Some(&row.key) == self.project.as_ref() && row.user == user,
                _ => false,
            })
            .map(|row| format!("{} {} {}", row.kind, row.user, row.state))
            .collect();
        stands.sort_unstable();
        stands
    }
}

impl StreamRegistration {
    /// Completes when the rights must be checked again.
    pub(crate) async fn changed(&self) {
        self.wake.notified().await;
    }

    /// Requests another check, because the last one failed.
    pub(crate) fn again(&self) {
        if let Some(stream) = self.app.stream_rights().0.lock().streams.get_mut(&self.id) {
            stream.stood = None;
        }
    }
}

impl Drop for StreamRegistration {
    fn drop(&mut self) {
        self.app.stream_rights().0.lock().streams.remove(&self.id);
    }
}

/// Polls until no stream is open or the server stops.
async fn poll_rights(app: App) {
    loop {
        tokio::select! {
            () = sleep(app.settings().rights_poll_interval) => {}
            // Streams end with the server.
            () = app.closed() => return,
        }
        let Some(wanted) = app.stream_rights().wanted() else { return };
        let (hashes, queue): (Vec<_>, Vec<_>) =
            (wanted.hashes.into_iter().collect(), wanted.queue_tokens.into_iter().collect());
        let (projects, users): (Vec<_>, Vec<_>) =
            (wanted.projects.into_iter().collect(), wanted.users.into_iter().collect());
        let idle = app.settings().limits.web_sessions.idle;
        match tokens::access_states(app.db(), &hashes, &queue, &projects, &users, idle).await {
            Ok(found) => app.stream_rights().notify_changed(&app, &found),
            // A database that does not answer revokes no rights.
            Err(error) => tracing::debug!(%error, "failed to read the rights of streams"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Settings, SettingsSource};

    #[test]
    fn the_interval_leaves_time_for_the_checks_within_the_promised_five_seconds() {
        let given = SettingsSource { data_dir: Some("/h".into()), ..SettingsSource::default() };
        let settings = Settings::new(given, None).unwrap();
        assert!(settings.rights_poll_interval * 2 < std::time::Duration::from_secs(5));
    }

    fn row(kind: &str, key: &str, user: &str, state: &str) -> AccessState {
        AccessState { kind: kind.into(), key: key.into(), user: user.into(), state: state.into() }
    }

    #[test]
    fn stream_rights_depend_only_on_their_own_token_project_and_membership() {
        let user = UserId(uuid::Uuid::from_u128(7));
        let ground = RightsBasis {
            user,
            token_hash: "h".into(),
            queue_token: Some("q".into()),
            project: Some("main".into()),
        };
        let mine = user.to_string();
        let mut rows = vec![
            row("token", "h", &mine, "user user"),
            row("project", "main", "", "closed"),
            row("member", "main", &mine, "manager"),
        ];
        let before = ground.stands(&rows);
        rows.insert(0, row("member", "main", "another", "user"));
        rows.push(row("token", "another", "another", "user user"));
        rows.push(row("project", "other", "", "public"));
        rows.push(row("queue", "another", "another", "user"));
        assert_eq!(ground.stands(&rows), before, "what others have is of no matter");
        rows.retain(|row| !(row.kind == "member" && row.user == mine));
        assert_ne!(ground.stands(&rows), before);
        assert!(ground.stands(&[]).is_empty());
    }
}
