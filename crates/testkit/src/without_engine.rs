//! This machine as one on which no container engine is installed.

use std::{ffi::OsString, path::Path};

/// Variable that also hides `crun` and `runc`, if it is not empty.
pub const HIDE_OCI_PROGRAMS: &str = "HIDE_OCI_PROGRAMS";

/// Hides the engines of this machine behind an overlay, in the mount namespace of the shell that runs it. The first argument
/// is a directory for the overlay.
pub(crate) const HIDE_ENGINE: &str = "set -e
mkdir -p $1; mount -t tmpfs none $1
mkdir -p $1/upper/bin $1/upper/sbin $1/upper/local/bin $1/upper/lib/systemd/system $1/work
for file in bin/dockerd sbin/dockerd lib/systemd/system/docker.service bin/docker local/bin/docker bin/podman \
    local/bin/podman bin/apptainer bin/singularity; do
    if [ -e /usr/$file ]; then mknod $1/upper/$file c 0 0; fi
done
if [ -n \"$HIDE_OCI_PROGRAMS\" ]; then
    for file in bin/crun bin/runc sbin/crun sbin/runc; do
        if [ -e /usr/$file ]; then mknod $1/upper/$file c 0 0; fi
    done
fi
mount -t overlay -o lowerdir=/usr,upperdir=$1/upper,workdir=$1/work overlay /usr
";

/// Returns a command line that runs the program there; its arguments are to be added. `scratch` is an existing directory.
pub fn words(scratch: &Path, program: &Path) -> Vec<OsString> {
    let script = format!("set -e\nmount --make-rprivate /\n{HIDE_ENGINE}shift; exec \"$@\"");
    let mut words: Vec<OsString> = ["unshare", "-m", "sh", "-c", &script, "sh"].map(OsString::from).to_vec();
    words.extend([scratch.join("usr").into_os_string(), program.as_os_str().to_owned()]);
    words
}
