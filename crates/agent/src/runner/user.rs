//! User account of the job: users and groups read from `/etc/passwd` and `/etc/group`.
//!
//! The binary is static and must work in images without a C library, so the files are parsed here and no name service
//! is used. An image without the files has one user, root.

use std::{
    io,
    path::{Path, PathBuf},
};

use windlass_api::agent::runner::User;

const PASSWD: &str = "etc/passwd";
const GROUP: &str = "etc/group";
/// Maximum number of bytes read of a file: no image has this many users.
const FILE_BYTES_MAX: u64 = 16 << 20;
const DEFAULT_SHELL: &str = "/bin/sh";

/// User as the kernel and the environment see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups, including `gid`.
    pub groups: Vec<u32>,
    /// Name, or the number as text if the user has no name.
    pub name: String,
    pub home: PathBuf,
    pub shell: PathBuf,
}

impl Account {
    /// Default root account, used if the files have no entry for it.
    pub fn root() -> Self {
        Self {
            uid: 0,
            gid: 0,
            groups: vec![0],
            name: "root".to_owned(),
            home: PathBuf::from("/root"),
            shell: PathBuf::from(DEFAULT_SHELL),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum UserError {
    #[error("user {0} does not exist in /etc/passwd")]
    NoUser(String),
    #[error("group {0} does not exist in /etc/group")]
    NoGroup(String),
    #[error("cannot run as user {uid}: the runner is user {own}, not root")]
    NotRoot { uid: u32, own: u32 },
    #[error("failed to read {file}")]
    Read {
        file: PathBuf,
        #[source]
        source: io::Error,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct PasswdEntry {
    name: String,
    uid: u32,
    gid: u32,
    home: String,
    shell: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct GroupEntry {
    name: String,
    gid: u32,
    members: Vec<String>,
}

/// Users and groups of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserDatabase {
    entries: Vec<PasswdEntry>,
    groups: Vec<GroupEntry>,
}

impl UserDatabase {
    /// Reads the files below `root`; an absent file counts as empty.
    pub fn read_file(root: &Path) -> Result<Self, UserError> {
        Ok(Self::parse(&read(&root.join(PASSWD))?, &read(&root.join(GROUP))?))
    }

    /// Ignores malformed lines, as the C library does.
    pub fn parse(passwd: &str, group: &str) -> Self {
        Self {
            entries: passwd.lines().filter_map(parse_passwd_line).collect(),
            groups: group.lines().filter_map(parse_group_line).collect(),
        }
    }

    /// Resolves the requested user; `None` means the user of the runner itself.
    pub fn account(&self, requested: Option<&User>, own_uid: u32) -> Result<Account, UserError> {
        let mut account = match requested {
            None => self.by_uid(own_uid),
            Some(User { uid: Some(uid), .. }) => self.by_uid(*uid),
            Some(User { username: Some(name), .. }) if !name.is_empty() => self.by_name(name)?,
            Some(_) => self.by_uid(own_uid),
        };
        if let Some(gid) = self.requested_gid(requested)? {
            account.gid = gid;
            if !account.groups.contains(&gid) {
                account.groups.insert(0, gid);
            }
        }
        if own_uid != 0 && account.uid != own_uid {
            return Err(UserError::NotRoot { uid: account.uid, own: own_uid });
        }
        Ok(account)
    }

    /// Finds a user by name; a number that is not a name counts as a user id.
    fn by_name(&self, name: &str) -> Result<Account, UserError> {
        if let Some(entry) = self.entries.iter().find(|entry| entry.name == name) {
            return Ok(self.account_from_entry(entry));
        }
        if name == "root" && self.entries.is_empty() {
            return Ok(Account::root());
        }
        name.parse().map(|uid| self.by_uid(uid)).map_err(|_| UserError::NoUser(name.to_owned()))
    }

    /// Finds a user by id. An id needs no entry: it then has group 0 and home `/`, as with container engines.
    fn by_uid(&self, uid: u32) -> Account {
        match self.entries.iter().find(|entry| entry.uid == uid) {
            Some(entry) => self.account_from_entry(entry),
            None if uid == 0 => Account::root(),
            None => Account {
                uid,
                gid: 0,
                groups: vec![0],
                name: uid.to_string(),
                home: PathBuf::from("/"),
                shell: PathBuf::from(DEFAULT_SHELL),
            },
        }
    }

    fn account_from_entry(&self, entry: &PasswdEntry) -> Account {
        let mut groups = vec![entry.gid];
        for group in &self.groups {
            if group.members.contains(&entry.name) && !groups.contains(&group.gid) {
                groups.push(group.gid);
            }
        }
        let or = |text: &str, otherwise: &str| PathBuf::from(if text.is_empty() { otherwise } else { text });
        Account {
            uid: entry.uid,
            gid: entry.gid,
            groups,
            name: entry.name.clone(),
            home: or(&entry.home, "/"),
            shell: or(&entry.shell, DEFAULT_SHELL),
        }
    }

    fn requested_gid(&self, requested: Option<&User>) -> Result<Option<u32>, UserError> {
        let Some(requested) = requested else { return Ok(None) };
        if requested.gid.is_some() {
            return Ok(requested.gid);
        }
        let Some(name) = requested.groupname.as_deref().filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        if let Some(group) = self.groups.iter().find(|group| group.name == name) {
            return Ok(Some(group.gid));
        }
        if name == "root" && self.groups.is_empty() {
            return Ok(Some(0));
        }
        name.parse().map(Some).map_err(|_| UserError::NoGroup(name.to_owned()))
    }
}

/// Performs file operations with the rights of the account, on a separate thread: a link that the user created cannot
/// lead to paths which the user may not access. A runner that is not root has no other rights anyway.
pub fn run_as_account<T: Send>(
    account: &Account,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    use rustix::{
        process::{Gid, Uid, geteuid},
        thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
    };
    if !geteuid().is_root() || account.uid == 0 {
        return work();
    }
    let groups: Vec<Gid> = account.groups.iter().copied().map(Gid::from_raw).collect();
    let (uid, gid) = (Uid::from_raw(account.uid), Gid::from_raw(account.gid));
    let changed = || {
        set_thread_groups(&groups)?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
        work()
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("as-user".to_owned()).spawn_scoped(scope, changed)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
    })
}

/// Creates the directory and its missing parents; new directories belong to the account.
///
/// In a container root creates them, so that a job may use a path like `/workflow`. On a bare host only the rights of
/// the account are used.
pub fn create_dir_as(path: &Path, account: &Account, in_container: bool) -> io::Result<()> {
    if !in_container {
        return run_as_account(account, || std::fs::create_dir_all(path));
    }
    let missing: Vec<&Path> = path.ancestors().take_while(|dir| !dir.exists()).collect();
    for dir in missing.into_iter().rev() {
        match std::fs::create_dir(dir) {
            Ok(()) => std::os::unix::fs::lchown(dir, Some(account.uid), Some(account.gid))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    if path.is_dir() { Ok(()) } else { Err(io::ErrorKind::NotADirectory.into()) }
}

fn read(file: &Path) -> Result<String, UserError> {
    use std::io::Read as _;
    let failed = |source| UserError::Read { file: file.to_owned(), source };
    let opened = match std::fs::File::open(file) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    opened.take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn parse_passwd_line(line: &str) -> Option<PasswdEntry> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| !name.is_empty() && !name.starts_with('#'))?;
    let _password = fields.next()?;
    let uid = fields.next()?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let _gecos = fields.next();
    let home = fields.next().unwrap_or_default();
    let shell = fields.next().unwrap_or_default();
    Some(PasswdEntry {
        name: name.to_owned(),
        uid,
        gid,
        home: home.to_owned(),
        shell: shell.trim().to_owned(),
    })
}

fn parse_group_line(line: &str) -> Option<GroupEntry> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| !name.is_empty() && !name.starts_with('#'))?;
    let _password = fields.next()?;
    let gid = fields.next()?.parse().ok()?;
    let members = fields.next().unwrap_or_default();
    let members = members.split(',').map(str::trim).filter(|name| !name.is_empty());
    Some(GroupEntry { name: name.to_owned(), gid, members: members.map(str::to_owned).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD_TEXT: &str = "root:x:0:0:root:/root:/bin/bash\n\
        # a remark\n\
        broken line\n\
        ada:x:1000:1000:Ada,,,:/home/ada:/bin/zsh\n\
        bare:x:1001:100::: \n\
        nan:x:abc:100::/:/bin/sh\n\
        77:x:2000:2000::/home/77:/bin/sh\n";
    const GROUP_TEXT: &str = "root:x:0:\nada:x:1000:\nvideo:x:44:ada, bob\nusers:x:100:bob\n";

    fn users() -> UserDatabase {
        UserDatabase::parse(PASSWD_TEXT, GROUP_TEXT)
    }

    fn named(name: &str) -> User {
        User { username: Some(name.to_owned()), ..User::default() }
    }

    #[test]
    fn a_user_name_resolves_to_its_groups_home_and_shell() {
        let ada = users().account(Some(&named("ada")), 0).unwrap();
        assert_eq!((ada.uid, ada.gid, ada.groups.as_slice()), (1000, 1000, [1000, 44].as_slice()));
        assert_eq!((ada.home.to_str(), ada.shell.to_str()), (Some("/home/ada"), Some("/bin/zsh")));
        let bare = users().account(Some(&named("bare")), 0).unwrap();
        assert_eq!((bare.home.to_str(), bare.shell.to_str()), (Some("/"), Some("/bin/sh")));
    }

    #[test]
    fn users_are_found_by_name_then_by_number() {
        let found = |user: &User| {
            users().account(Some(user), 0).map(|account| (account.uid, account.gid, account.name))
        };
        let uid = |uid| User { uid: Some(uid), ..User::default() };
        assert_eq!(found(&uid(1000)).unwrap(), (1000, 1000, "ada".to_owned()));
        assert_eq!(found(&uid(65534)).unwrap(), (65534, 0, "65534".to_owned()));
        assert_eq!(found(&named("77")).unwrap(), (2000, 2000, "77".to_owned()));
        assert_eq!(found(&named("78")).unwrap(), (78, 0, "78".to_owned()));
        assert_eq!(found(&User::default()).unwrap(), (0, 0, "root".to_owned()));
        assert_eq!(found(&named("eve")).unwrap_err().to_string(), "user eve does not exist in /etc/passwd");
    }

    #[test]
    fn the_requested_group_replaces_the_primary_group() {
        let with = |group: User| users().account(Some(&User { username: Some("ada".into()), ..group }), 0);
        let by_name = with(User { groupname: Some("users".into()), ..User::default() }).unwrap();
        assert_eq!((by_name.gid, by_name.groups.as_slice()), (100, [100, 1000, 44].as_slice()));
        let by_number = with(User { gid: Some(7), ..User::default() }).unwrap();
        assert_eq!(by_number.gid, 7);
        let number_as_name = with(User { groupname: Some("9".into()), ..User::default() }).unwrap();
        assert_eq!(number_as_name.gid, 9);
        assert!(with(User { groupname: Some("nope".into()), ..User::default() }).is_err());
    }

    #[test]
    fn an_image_without_a_passwd_file_has_only_root() {
        let none = UserDatabase::default();
        assert_eq!(none.account(None, 0).unwrap(), Account::root());
        assert_eq!(none.account(Some(&named("root")), 0).unwrap(), Account::root());
        assert!(none.account(Some(&named("ada")), 0).is_err());
    }

    #[test]
    fn a_non_root_runner_cannot_become_another_user() {
        assert_eq!(users().account(None, 1000).unwrap().name, "ada");
        assert_eq!(users().account(Some(&named("ada")), 1000).unwrap().name, "ada");
        let refused = users().account(Some(&named("root")), 1000).unwrap_err();
        assert_eq!(refused.to_string(), "cannot run as user 0: the runner is user 1000, not root");
    }
}
