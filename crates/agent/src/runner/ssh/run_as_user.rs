//! Operations performed with a user's rights and not with the runner's.

use std::io;

use rustix::{
    process::{Gid, Uid, geteuid},
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};
use tokio::sync::oneshot;

use crate::runner::user::Account;

/// Returns whether the runner has to change its user for this account, and may.
pub(super) fn needs_switch(account: &Account) -> bool {
    geteuid().is_root() && account.uid != 0
}

/// Runs `work` on a separate thread that has become the account. Rights belong to a thread on Linux; the thread ends
/// with the work, so no other code ever runs with them.
pub(super) async fn run_as<T: Send + 'static>(
    account: &Account,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (answer, answered) = oneshot::channel();
    let account = needs_switch(account).then(|| account.clone());
    std::thread::Builder::new().name("rights".to_owned()).stack_size(128 * 1024).spawn(move || {
        let done = account.map_or(Ok(()), |account| switch_to_account(&account)).and_then(|()| work());
        let _ = answer.send(done);
    })?;
    answered.await.map_err(|_| io::Error::other("the thread panicked"))?
}

/// Changes the user of the calling thread only; in a child before exec, that is the whole process.
pub(super) fn switch_to_account(account: &Account) -> io::Result<()> {
    // No allocation here: this also runs between fork and exec.
    let mut groups = [Gid::ROOT; GROUPS_MAX];
    let count = account.groups.len().min(GROUPS_MAX);
    for (place, gid) in groups.iter_mut().zip(&account.groups) {
        *place = Gid::from_raw(*gid);
    }
    set_thread_groups(&groups[..count])?;
    let gid = Gid::from_raw(account.gid);
    set_thread_res_gid(gid, gid, gid)?;
    let uid = Uid::from_raw(account.uid);
    set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}

/// Maximum number of supplementary groups; the rest is ignored.
const GROUPS_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_runs_as_the_account_and_the_caller_keeps_its_user() {
        assert!(geteuid().is_root(), "this test needs root");
        let nobody = Account { uid: 65534, gid: 65534, groups: vec![65534], ..Account::root() };
        let (inside, opened) = run_as(&nobody, || {
            Ok((geteuid().as_raw(), std::fs::File::open("/etc/shadow").map(drop).map_err(|e| e.kind())))
        })
        .await
        .unwrap();
        assert_eq!(inside, 65534);
        assert_eq!(opened, Err(io::ErrorKind::PermissionDenied));
        assert!(geteuid().is_root());
    }
}
