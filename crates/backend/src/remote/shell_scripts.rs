//! Scripts that run on a host, and parsers of their output. Pure text processing.
//!
//! Scripts are passed to a plain `/bin/sh` on its standard input: nothing of them is in an argument list, and the login
//! shell does not have to parse them. Their output consists of lines of `name=value`.

use std::collections::BTreeMap;

use serde::Deserialize;
use windlass_api::agent::shim::HostInfo;

use crate::{BackendError, Enrolment, GpuInfo, HardwareInfo};

/// Directory of windlass on a host.
pub const ROOT: &str = "/var/lib/windlass";
/// Socket of the agent. Its directory belongs to the group of the login user and passes that group on to the socket:
/// the SSH server can thus connect a user without root rights, and no other user.
pub const SOCKET: &str = "/var/lib/windlass/door/shim.sock";
/// Binary of the agent.
pub const AGENT: &str = "/var/lib/windlass/agent";
/// Directory of the programs that run containers, if the server brings one along.
const OCI_PROGRAMS: &str = "/var/lib/windlass/oci-program";
/// Path prefix of its uploads until they are complete.
pub(super) const INCOMING_OCI_PROGRAM: &str = "/var/lib/windlass/incoming/oci-program";
/// Path prefix of uploads until they are complete.
pub(super) const INCOMING: &str = "/var/lib/windlass/incoming/agent";
/// Unit of the agent, where systemd runs.
pub const UNIT: &str = "/etc/systemd/system/windlass-agent.service";
/// Cron entry of the agent, where there is cron and no systemd.
pub const CRON: &str = "/etc/cron.d/windlass-agent";

/// Maximum length of a host's output in messages.
const HOST_TEXT_MAX: usize = 400;

/// Reports the user's identity and rights, and the platform of the host. Run as the user.
pub(super) const PROBE_HOST: &str = r#"
echo "os=$(uname -s)"
echo "arch=$(uname -m)"
echo "uid=$(id -u)"
echo "gid=$(id -g)"
echo "local=$(echo "$SSH_CONNECTION" | cut -d' ' -f3)"
if [ "$(id -u)" = 0 ]; then echo rights=root
elif ! command -v sudo >/dev/null 2>&1; then echo rights=no-sudo
elif sudo -n true >/dev/null 2>&1; then echo rights=sudo
else echo rights=password; fi
"#;

/// Reports the existing installation. Run as root.
pub(super) const PROBE_INSTALLATION: &str = r#"
R=/var/lib/windlass
[ -d $R ] && echo root=yes
[ -f $R/agent ] && echo "agent=$(sha256sum < $R/agent | cut -d' ' -f1)"
[ -d $R/oci-program ] && echo "oci_programs=$(sha256sum $R/oci-program/*/* 2>/dev/null | cut -d' ' -f1 | tr '\n' ' ')"
[ -f $R/home/enrolment.json ] && echo "enrolment=$(tr -d '\n' < $R/home/enrolment.json)"
[ -f $R/home/runtime ] && echo "runtime=$(cat $R/home/runtime)"
[ -f $R/files ] && echo "files=$(cat $R/files)"
if [ -d /run/systemd/system ]; then echo keeper=systemd
elif [ -d /etc/cron.d ] && { pidof cron || pidof crond; } >/dev/null 2>&1; then echo keeper=cron
else echo keeper=none; fi
pid=$(cat $R/home/lock 2>/dev/null)
if [ -n "$pid" ]; then
  case "$(readlink /proc/$pid/exe 2>/dev/null)" in
    $R/agent|$R/agent\ *) echo "pid=$pid"; [ /proc/$pid/exe -ef $R/agent ] && echo current=yes ;;
  esac
fi
true
"#;

/// Returns the last lines of the agent's log. Run as root.
pub(super) const AGENT_LOG_TAIL: &str = r#"
if [ -d /run/systemd/system ]; then journalctl -q -n 5 -o cat -u windlass-agent 2>/dev/null
else tail -n 5 /var/lib/windlass/shim.log 2>/dev/null; fi
true
"#;

/// Starts the agent. Leaves a running one alone if it is current, and replaces it otherwise: its tasks continue, and
/// the next one adopts them. Run as root.
pub(super) const START_AGENT: &str = r#"
R=/var/lib/windlass
pid=$(cat $R/home/lock 2>/dev/null)
case "$(readlink /proc/${pid:-none}/exe 2>/dev/null)" in $R/agent|$R/agent\ *) ;; *) pid= ;; esac
[ -n "$pid" ] && [ /proc/$pid/exe -ef $R/agent ] && exit 0
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload && systemctl -q enable windlass-agent && exec systemctl restart windlass-agent
fi
if [ -n "$pid" ]; then
  kill -TERM $pid
  n=0; while [ -e /proc/$pid ] && [ $n -lt 100 ]; do sleep 0.1; n=$((n+1)); done
  kill -KILL $pid 2>/dev/null
fi
exec /bin/sh $R/start detached
"#;

/// Stops the agent and removes the installation. Its tasks have ended before. Run as root.
pub(super) const UNINSTALL: &str = r#"
R=/var/lib/windlass
if [ -d /run/systemd/system ] && [ -f /etc/systemd/system/windlass-agent.service ]; then
  systemctl -q disable --now windlass-agent
  rm -f /etc/systemd/system/windlass-agent.service
  systemctl daemon-reload
fi
rm -f /etc/cron.d/windlass-agent
pid=$(cat $R/home/lock 2>/dev/null)
case "$(readlink /proc/${pid:-none}/exe 2>/dev/null)" in
  $R/agent|$R/agent\ *)
    kill -TERM $pid
    n=0; while [ -e /proc/$pid ] && [ $n -lt 100 ]; do sleep 0.1; n=$((n+1)); done
    kill -KILL $pid 2>/dev/null
esac
cut -d' ' -f2 /proc/mounts | grep "^$R/" | sort -r | while read -r at; do umount -l "$at"; done
rm -rf $R
[ ! -e $R ]
"#;

/// Values that a script printed, by name.
#[derive(Debug, Default)]
pub(super) struct ScriptOutput(BTreeMap<String, String>);

impl ScriptOutput {
    pub(super) fn read(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| line.split_once('='));
        Self(lines.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect())
    }

    pub(super) fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }
}

/// Platform and access rights on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostAccess {
    /// Architecture, as in `uname -m` on Debian.
    pub(super) arch: &'static str,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) is_root: bool,
    /// Address that was dialled, as the host sees it.
    pub(super) local: String,
}

/// Names of an architecture: of a binary, in `uname` on any system, in configurations.
const ARCHES: [(&str, &[&str], &str); 2] =
    [("x86_64", &["x86_64", "amd64"], "x86"), ("aarch64", &["aarch64", "arm64"], "arm")];

/// Returns the architecture of a binary for `x86` or `arm` in configurations.
pub(super) fn binary_arch(word: &str) -> Option<&'static str> {
    ARCHES.iter().find(|(.., ours)| *ours == word).map(|(arch, ..)| *arch)
}

/// Checks whether the host can be used.
pub(super) fn check_host(
    answers: &ScriptOutput,
    user: &str,
    arches: &[&str],
) -> Result<HostAccess, BackendError> {
    let refuse = |message: String| BackendError::Refused { what: "use the host", message };
    let (os, machine) = (answers.text("os"), answers.text("arch"));
    if os != "Linux" {
        return Err(refuse(format!("it runs `{os}`, and the agent supports only Linux")));
    }
    let known = ARCHES.iter().find(|(_, names, _)| names.contains(&machine)).map(|(arch, ..)| *arch);
    let Some(arch) = known.filter(|arch| arches.contains(arch)) else {
        let have = arches.join(", ");
        return Err(refuse(format!(
            "its architecture is `{machine}`, and the server has agents for: {have}. Put `windlass-agent-{machine}` \
             next to `windlass-agent` on the server"
        )));
    };
    let is_root = match answers.text("rights") {
        "root" => true,
        "sudo" => false,
        "no-sudo" => {
            return Err(refuse(format!(
                "user `{user}` is not root, and sudo is not installed. Log in as root, or install sudo"
            )));
        }
        _ => {
            return Err(refuse(format!(
                "user `{user}` cannot use sudo without a password. Run on the host as root: \
                 echo '{user} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/{user}"
            )));
        }
    };
    let number = |name| answers.text(name).parse().map_err(|_| refuse(format!("`id` printed no {name}")));
    Ok(HostAccess {
        arch,
        uid: number("uid")?,
        gid: number("gid")?,
        is_root,
        local: answers.text("local").to_owned(),
    })
}

/// Existing installation on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Installation {
    /// True if there is any installation.
    pub(super) any: bool,
    /// SHA-256 of the agent's binary.
    pub(super) agent: String,
    /// SHA-256 of the programs that run containers.
    pub(super) oci_programs: Vec<String>,
    pub(super) enrolment: Option<EnrolmentRecord>,
    /// Checksum of the files that the server writes.
    pub(super) files: String,
    pub(super) keeper: String,
    pub(super) runtime: String,
    /// True if the agent runs.
    pub(super) is_running: bool,
    /// True if it runs the installed binary.
    pub(super) is_current: bool,
}

/// Owner of the host, as recorded on it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct EnrolmentRecord {
    pub(super) instance_id: String,
    #[serde(default)]
    credential_sha256: Vec<String>,
    #[serde(default)]
    server_keys: Vec<String>,
    #[serde(default)]
    gateway: Option<GatewayRecord>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
struct GatewayRecord {
    user: String,
    key: String,
}

impl EnrolmentRecord {
    pub(super) fn matches(&self, enrolment: &Enrolment, user: &str) -> bool {
        let gateway = enrolment.gateway_key.clone().map(|key| GatewayRecord { user: user.to_owned(), key });
        self.instance_id == enrolment.instance.to_string()
            && self.credential_sha256 == [enrolment.credential_sha256.clone()]
            && self.server_keys == [enrolment.server_key.clone()]
            && self.gateway == gateway
    }
}

impl Installation {
    pub(super) fn read(answers: &ScriptOutput) -> Self {
        let text = |name| answers.text(name).to_owned();
        Self {
            any: answers.text("root") == "yes",
            agent: text("agent"),
            oci_programs: text("oci_programs").split_whitespace().map(str::to_owned).collect(),
            // An unreadable enrolment counts as none.
            enrolment: serde_json::from_str(answers.text("enrolment")).ok(),
            files: text("files"),
            keeper: text("keeper"),
            runtime: text("runtime"),
            is_running: !answers.text("pid").is_empty(),
            is_current: answers.text("current") == "yes",
        }
    }
}

/// Creates the directories with the rights that the user needs, and removes uploads of other binaries.
pub(super) fn prepare_script(host: &HostAccess, sha256: &str) -> String {
    let (uid, gid, part) = (host.uid, host.gid, &sha256[..16.min(sha256.len())]);
    format!(
        "set -e\numask 022\nmkdir -p {ROOT}/door {ROOT}/incoming\nchmod 711 {ROOT}\n\
         chown 0:{gid} {ROOT}/door\nchmod 2710 {ROOT}/door\n\
         chown {uid}:{gid} {ROOT}/incoming\nchmod 700 {ROOT}/incoming\n\
         for f in {ROOT}/incoming/*; do case $f in *{part}*) ;; *) rm -rf \"$f\" ;; esac; done\n"
    )
}

/// Installs an uploaded binary, after checking that it can run. Another upload may be in progress.
pub(super) fn install_script(uploaded: &str) -> String {
    format!(
        "set -e\nchown 0:0 {uploaded}\nchmod 755 {uploaded}\n{uploaded} --version\nmv -f {uploaded} {AGENT}\n\
         rmdir {ROOT}/incoming 2>/dev/null || true\n"
    )
}

/// Path of a program that runs containers. A running agent keeps using the one that it was started with.
pub(super) fn oci_program_path(name: &str, sha256: &str) -> String {
    format!("{OCI_PROGRAMS}/{}/{name}", &sha256[..16.min(sha256.len())])
}

/// Installs an uploaded program that runs containers, after checking that it can run.
pub(super) fn install_oci_program_script(uploaded: &str, path: &str) -> String {
    format!(
        "set -e\nchown 0:0 {uploaded}\nchmod 755 {uploaded}\n{uploaded} --version >/dev/null\n\
         umask 022\nmkdir -p $(dirname {path})\nmv -f {uploaded} {path}\nrmdir {ROOT}/incoming 2>/dev/null || true\n"
    )
}

/// Enrols the host. A running agent applies it at once. Gateways log in to the account of `user`.
pub(super) fn enrol_script(enrolment: &Enrolment, user: &str) -> String {
    let gateway = enrolment
        .gateway_key
        .as_ref()
        .map(|key| format!(" --gateway-key {} --gateway-user {}", shell_quote(key), shell_quote(user)));
    enrol_command(enrolment, &gateway.unwrap_or_default())
}

/// Enrols the host with a second credential and without a key of gateways, before it is released.
pub(super) fn last_enrol_script(enrolment: &Enrolment, second: &str) -> String {
    enrol_command(enrolment, &format!(" --credential-sha256 {}", shell_quote(second)))
}

fn enrol_command(enrolment: &Enrolment, more: &str) -> String {
    format!(
        "exec {AGENT} shim enrol --home {ROOT}/home --instance {} --credential-sha256 {} --server-key {}{more}\n",
        shell_quote(&enrolment.instance.to_string()),
        shell_quote(&enrolment.credential_sha256),
        shell_quote(&enrolment.server_key)
    )
}

/// Prints the hardware of the host, by its agent.
pub(super) fn describe_script() -> String {
    format!("mkdir -p {ROOT}/home\nexec {AGENT} host --data {ROOT}/home\n")
}

/// Files next to the binary: how it is started, and its environment variables.
#[derive(Debug)]
pub(super) struct Files {
    files: Vec<(&'static str, &'static str, String)>,
    gone: &'static str,
}

impl Files {
    pub(super) fn new(keeper: &str, env: &BTreeMap<String, String>) -> Result<Self, BackendError> {
        let mut lines = String::new();
        for (name, value) in env {
            let is_name =
                |at: usize, c: char| c == '_' || c.is_ascii_alphabetic() || (at > 0 && c.is_ascii_digit());
            if name.is_empty()
                || !name.chars().enumerate().all(|(at, c)| is_name(at, c))
                || value.contains('\0')
            {
                let message = format!(
                    "invalid environment variable `{name}`: invalid name, or a value with a zero byte"
                );
                return Err(BackendError::Refused { what: "set the agent's environment", message });
            }
            lines += &format!("{name}={}\n", shell_quote(value));
        }
        let start = format!("{START_HEAD}exec {AGENT} shim --home {ROOT}/home --socket {SOCKET}\n");
        let mut files =
            vec![("/var/lib/windlass/env", "600", lines), ("/var/lib/windlass/start", "755", start)];
        let mut gone = CRON;
        match keeper {
            "systemd" => files.push((UNIT, "644", UNIT_TEXT.to_owned())),
            "cron" => {
                files.push((CRON, "644", format!("@reboot root /bin/sh {ROOT}/start detached\n")));
                gone = UNIT;
            }
            _ => {}
        }
        Ok(Self { files, gone })
    }

    /// Returns a checksum of all files.
    pub(super) fn sum(&self) -> String {
        use sha2::Digest as _;
        hex::encode(sha2::Sha256::digest(format!("{self:?}")))
    }

    pub(super) fn write(&self) -> String {
        let mut script = format!("set -e\numask 077\nrm -f {}\n", self.gone);
        for (path, mode, text) in &self.files {
            script += &format!(
                "printf %s {} > {path}.$$\nchmod {mode} {path}.$$\nmv -f {path}.$$ {path}\n",
                shell_quote(text)
            );
        }
        script + &format!("echo {} > {ROOT}/files\n", self.sum())
    }
}

/// Head of the start script. Rotates the log at 16 MB, which a shim takes years to reach, and keeps the previous file.
const START_HEAD: &str = r#"#!/bin/sh
# Starts the agent of this host. Written by its server: changes here are lost.
R=/var/lib/windlass
if [ "$1" = detached ]; then
  [ "$(wc -c 2>/dev/null < $R/shim.log || echo 0)" -gt 16000000 ] && mv -f $R/shim.log $R/shim.log.1
  umask 077
  env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    setsid /bin/sh $R/start < /dev/null >> $R/shim.log 2>&1 &
  exit 0
fi
umask 022
cd /
set -a
. $R/env
set +a
"#;

/// systemd unit. Tasks are not part of the service: they survive its restart. No `OOMScoreAdjust`, because tasks would
/// inherit it.
const UNIT_TEXT: &str = "\
[Unit]
Description=windlass agent
Wants=network-online.target
After=network-online.target docker.service

[Service]
ExecStart=/bin/sh /var/lib/windlass/start
Restart=always
RestartSec=2
KillMode=process
Delegate=yes
LimitNOFILE=1048576
TasksMax=infinity

[Install]
WantedBy=multi-user.target
";

/// Describes what starts the agent after a reboot, for users.
pub(super) fn describe_keeper(keeper: &str) -> &'static str {
    match keeper {
        "systemd" => "systemd starts the agent at boot",
        "cron" => "cron starts the agent at boot",
        _ => "the host has neither systemd nor cron: the server starts the agent after a reboot",
    }
}

/// Output of `windlass-agent host`.
#[derive(Debug, Deserialize)]
struct HostDescription {
    host: HostInfo,
    #[serde(default)]
    gpus: Vec<GpuInfo>,
}

pub(super) fn parse_hardware(
    text: &str,
    arch: &str,
    runtime: &str,
) -> Result<HardwareInfo, serde_json::Error> {
    const MIB: u64 = 1 << 20;
    let HostDescription { host, gpus } = serde_json::from_str(text)?;
    let arch = ARCHES.iter().find(|(ours, ..)| *ours == arch).map(|(.., word)| (*word).to_owned());
    Ok(HardwareInfo {
        cpus: host.cpus,
        arch,
        memory_mib: host.memory / MIB,
        disk_mib: host.disk_size / MIB,
        gpus,
        runtime: runtime.to_owned(),
        engine_away: None,
        processes: host.processes,
        addresses: host.addresses,
    })
}

/// Quotes a text as one argument of a shell command.
fn shell_quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Formats the output of a host for a message: one line, bounded, without control characters.
pub(super) fn sanitize(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().filter(|c| !c.is_control()).take(HOST_TEXT_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluated(text: &str) -> String {
        match check_host(&ScriptOutput::read(text), "ada", &["x86_64"]) {
            Ok(host) => format!("{} root={} at {}", host.arch, host.is_root, host.local),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn an_unsupported_host_is_rejected_with_instructions() {
        let ids = "uid=1000\ngid=1000\nlocal=10.0.0.1\n";
        let good = evaluated(&format!("os=Linux\narch=amd64\nrights=sudo\n{ids}"));
        assert_eq!(good, "x86_64 root=false at 10.0.0.1");
        let table = [
            ("os=Darwin\narch=arm64\nrights=root\n", "the agent supports only Linux"),
            ("os=Linux\narch=riscv64\nrights=root\n", "Put `windlass-agent-riscv64` next to"),
            ("os=Linux\narch=arm64\nrights=root\n", "the server has agents for: x86_64"),
            ("os=Linux\narch=x86_64\nrights=no-sudo\n", "install sudo"),
            ("os=Linux\narch=x86_64\nrights=password\n", "echo 'ada ALL=(ALL) NOPASSWD: ALL'"),
            ("", "it runs ``"),
        ];
        for (answers, expected) in table {
            let message = evaluated(&format!("{answers}{ids}"));
            assert!(
                message.starts_with("failed to use the host: ") && message.contains(expected),
                "{message}"
            );
        }
    }

    #[test]
    fn environment_values_survive_the_shell_and_invalid_names_are_rejected() {
        let env = [("A".to_owned(), "it's $HOME `id`\nand \"more\"".to_owned())].into();
        let files = Files::new("none", &env).unwrap();
        let script = files.write().replace(ROOT, "ROOT");
        let dir = windlass_testkit::temp_dir("script").unwrap();
        let dir = dir.path();
        let script = script.replace("ROOT", &dir.display().to_string());
        let wrote = std::process::Command::new("/bin/sh").args(["-c", &script]).status().unwrap();
        let read = format!(". {}/env; printf %s \"$A\"", dir.display());
        let read = std::process::Command::new("/bin/sh").args(["-c", &read]).output().unwrap();
        assert!(wrote.success());
        assert_eq!(String::from_utf8(read.stdout).unwrap(), env["A"]);
        for bad in ["", "1A", "A-B", "A;id", "A B"] {
            assert!(Files::new("none", &[(bad.to_owned(), String::new())].into()).is_err(), "{bad}");
        }
        let other = Files::new("none", &[("A".to_owned(), "2".to_owned())].into()).unwrap();
        assert_ne!(files.sum(), other.sum());
        assert_ne!(files.sum(), Files::new("systemd", &env).unwrap().sum());
    }

    #[test]
    fn host_output_becomes_one_bounded_line_without_control_characters() {
        assert_eq!(sanitize("a\n\tb \u{1b}[31m c"), "a b [31m c");
        assert_eq!(sanitize(&"x".repeat(5000)).len(), HOST_TEXT_MAX);
    }

    #[test]
    fn several_servers_can_write_the_host_files_concurrently() {
        let dir = windlass_testkit::temp_dir("script").unwrap();
        let files = Files::new("none", &BTreeMap::new()).unwrap();
        let script = files.write().replace(ROOT, &dir.path().display().to_string());
        let start = || std::process::Command::new("/bin/sh").args(["-c", &script]).spawn().unwrap();
        for _ in 0..20 {
            let writers: Vec<_> = (0..8).map(|_| start()).collect();
            for mut writer in writers {
                assert!(writer.wait().unwrap().success());
            }
        }
    }
}
