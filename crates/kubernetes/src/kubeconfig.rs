//! Access to clusters: contexts of a kubeconfig, or the service account of the server's own pod.

use std::path::{Path, PathBuf};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json};
use windlass_model::config::yaml::{self, Node};

use crate::{
    login::{ExecPlugin, Login},
    settings::{DEFAULT_NAMESPACE, KubeconfigSource, KubernetesSettings, SettingsError},
};

/// Files of the service account in every pod.
const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Region of the server's own cluster.
const IN_CLUSTER_REGION: &str = "in-cluster";

/// Address of a cluster, and the identity for it.
pub(crate) struct ClusterAccess {
    /// Name of the context, which is the region.
    pub(crate) name: String,
    pub(crate) namespace: String,
    /// `https://host:port`, possibly with a path.
    pub(crate) server: String,
    /// Name in the server's certificate, if it differs from the host.
    pub(crate) tls_name: Option<String>,
    /// Certificate authorities as PEM; `None`: those that this machine trusts.
    pub(crate) authorities: Option<Vec<u8>>,
    /// The kubeconfig says `insecure-skip-tls-verify`.
    pub(crate) skips_verification: bool,
    /// Certificate and key as PEM.
    pub(crate) certificate: Option<(Vec<u8>, Vec<u8>)>,
    pub(crate) login: Login,
}

/// Contains no keys.
impl std::fmt::Debug for ClusterAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterAccess")
            .field("name", &self.name)
            .field("server", &self.server)
            .field("login", &self.login)
            .finish_non_exhaustive()
    }
}

/// Returns the clusters of the settings.
pub(crate) fn load(settings: &KubernetesSettings) -> Result<Vec<ClusterAccess>, SettingsError> {
    let (text, dir) = match &settings.kubeconfig {
        None => return Ok(vec![in_cluster(Path::new(SERVICE_ACCOUNT_DIR), settings)?]),
        Some(KubeconfigSource::Data(text)) => (text.clone(), PathBuf::new()),
        Some(KubeconfigSource::Filename(path)) => {
            let path = expand_home(path);
            let text = std::fs::read_to_string(&path)
                .map_err(|source| SettingsError::Read { path: path.clone(), source })?;
            (text, path.parent().map(Path::to_owned).unwrap_or_default())
        }
    };
    let failed = |message: String| SettingsError::Kubeconfig { message };
    let config = yaml::read(&text).map_err(|problem| failed(problem.to_string()))?;
    let mut names = settings.contexts.clone();
    if names.is_empty() {
        let current = text_of(&config, "current-context");
        names.push(current.ok_or_else(|| failed("it has no `current-context`; set `contexts`".to_owned()))?);
    }
    let one = |name: &String| context(&config, name, &dir, settings).map_err(failed);
    names.iter().map(one).collect()
}

fn context(
    config: &Node,
    name: &str,
    dir: &Path,
    settings: &KubernetesSettings,
) -> Result<ClusterAccess, String> {
    let context = named(config, "contexts", name, "context")?;
    let reference =
        |key: &str| text_of(context, key).ok_or_else(|| format!("context `{name}` names no `{key}`"));
    let cluster = named(config, "clusters", &reference("cluster")?, "cluster")?;
    let user = named(config, "users", &reference("user")?, "user")?;
    let server = text_of(cluster, "server")
        .ok_or_else(|| format!("the cluster of context `{name}` has no `server`"))?;
    let certificate =
        match (file_or_data(user, "client-certificate", dir)?, file_or_data(user, "client-key", dir)?) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => {
                return Err(format!(
                    "the user of context `{name}` needs both `client-certificate` and `client-key`"
                ));
            }
        };
    Ok(ClusterAccess {
        name: name.to_owned(),
        namespace: settings
            .namespace
            .clone()
            .or_else(|| text_of(context, "namespace"))
            .unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()),
        tls_name: text_of(cluster, "tls-server-name"),
        authorities: file_or_data(cluster, "certificate-authority", dir)?,
        skips_verification: text_of(cluster, "insecure-skip-tls-verify").is_some_and(|word| word == "true"),
        certificate,
        login: login(user, dir)?,
        server,
    })
}

/// Returns the entry of a list of the kubeconfig: `{name, KEY: …}`.
fn named<'a>(config: &'a Node, list: &str, name: &str, key: &str) -> Result<&'a Node, String> {
    let entries = items(config.field(list));
    let entry = entries.iter().find(|entry| text_of(entry, "name").as_deref() == Some(name));
    let found = entry.ok_or_else(|| format!("it has no entry `{name}` in `{list}`"))?;
    found.field(key).ok_or_else(|| format!("entry `{name}` in `{list}` has no `{key}`"))
}

fn items(node: Option<&Node>) -> &[Node] {
    match node.map(|node| &node.value) {
        Some(yaml::Value::Seq(items)) => items,
        Some(yaml::Value::Null | yaml::Value::Scalar(_) | yaml::Value::Map(_)) | None => &[],
    }
}

fn scalar(node: &Node) -> Option<String> {
    match &node.value {
        yaml::Value::Scalar(scalar) => Some(scalar.text.clone()),
        yaml::Value::Null | yaml::Value::Seq(_) | yaml::Value::Map(_) => None,
    }
}

fn text_of(node: &Node, key: &str) -> Option<String> {
    node.field(key).and_then(scalar).filter(|text| !text.is_empty())
}

/// Returns the content of `KEY-data`, else of the file `KEY`.
fn file_or_data(node: &Node, key: &str, dir: &Path) -> Result<Option<Vec<u8>>, String> {
    let data_key = format!("{key}-data");
    if let Some(data) = text_of(node, &data_key) {
        let packed: String = data.split_whitespace().collect();
        return BASE64.decode(packed).map(Some).map_err(|_| format!("`{data_key}` is not base64"));
    }
    let Some(path) = text_of(node, key) else { return Ok(None) };
    let path = dir.join(path);
    std::fs::read(&path).map(Some).map_err(|error| format!("failed to read `{}`: {error}", path.display()))
}

fn login(user: &Node, dir: &Path) -> Result<Login, String> {
    for key in ["auth-provider", "username", "as"] {
        if user.field(key).is_some() {
            return Err(format!("`{key}` of users is not supported: use a token, a certificate or `exec`"));
        }
    }
    if let Some(exec) = user.field("exec") {
        let command = text_of(exec, "command").ok_or("`exec` has no `command`")?;
        // A relative path is relative to the file; a plain name is searched for.
        let command = if command.contains('/') { dir.join(&command) } else { PathBuf::from(command) };
        let env = items(exec.field("env")).iter().filter_map(|entry| {
            Some((text_of(entry, "name")?, entry.field("value").and_then(scalar).unwrap_or_default()))
        });
        let version =
            text_of(exec, "apiVersion").unwrap_or_else(|| "client.authentication.k8s.io/v1".to_owned());
        return Ok(Login::exec(ExecPlugin {
            command,
            args: items(exec.field("args")).iter().filter_map(scalar).collect(),
            env: env.collect(),
            info: json!({
                "apiVersion": version, "kind": "ExecCredential", "spec": { "interactive": false },
            })
            .to_string(),
        }));
    }
    if let Some(path) = text_of(user, "tokenFile") {
        return Ok(Login::TokenFile(dir.join(path)));
    }
    Ok(text_of(user, "token").map_or(Login::None, Login::Token))
}

/// Returns the cluster that the server itself runs in.
fn in_cluster(dir: &Path, settings: &KubernetesSettings) -> Result<ClusterAccess, SettingsError> {
    let failed = |message: String| SettingsError::NotInCluster { message };
    let variable = |name: &str| {
        std::env::var(name)
            .ok()
            .filter(|value| !value.is_empty())
            .ok_or_else(|| failed(format!("`{name}` is not set")))
    };
    let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let authorities = std::fs::read(dir.join("ca.crt"))
        .map_err(|error| failed(format!("failed to read the service account's `ca.crt`: {error}")))?;
    let namespace = std::fs::read_to_string(dir.join("namespace")).ok().map(|text| text.trim().to_owned());
    Ok(ClusterAccess {
        name: IN_CLUSTER_REGION.to_owned(),
        namespace: settings.namespace.clone().or(namespace).unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()),
        server: format!("https://{host}:{port}"),
        tls_name: None,
        authorities: Some(authorities),
        skips_verification: false,
        certificate: None,
        login: Login::TokenFile(dir.join("token")),
    })
}

/// Expands `~/`.
fn expand_home(path: &Path) -> PathBuf {
    match (path.strip_prefix("~"), std::env::var_os("HOME")) {
        (Ok(rest), Some(home)) => PathBuf::from(home).join(rest),
        (Ok(_) | Err(_), _) => path.to_owned(),
    }
}

/// Returns the token of an answer of an exec plugin, and the time until which it is valid.
pub(crate) fn parse_exec_credential(answer: &[u8]) -> Result<(String, Option<jiff::Timestamp>), String> {
    let answer: Value = serde_json::from_slice(answer).map_err(|error| format!("not JSON: {error}"))?;
    let status = &answer["status"];
    let token = status["token"].as_str().filter(|token| !token.is_empty());
    let token = token.ok_or("it has no `status.token`")?;
    let until = status["expirationTimestamp"].as_str().and_then(|text| text.parse().ok());
    Ok((token.to_owned(), until))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "
apiVersion: v1
kind: Config
current-context: east
clusters:
- {name: c, cluster: {server: 'https://10.0.0.1:6443', certificate-authority-data: aGVsbG8=}}
- name: open
  cluster: {server: 'https://10.0.0.2', insecure-skip-tls-verify: true, tls-server-name: kube}
users:
- {name: t, user: {token: abc}}
- {name: cert, user: {client-certificate: c.pem, client-key: k.pem}}
- name: plugin
  user:
    exec: {apiVersion: client.authentication.k8s.io/v1beta1, command: ./get, args: [token], env: [{name: A, value: b}]}
- {name: old, user: {auth-provider: {name: gcp}}}
contexts:
- {name: east, context: {cluster: c, user: t, namespace: jobs}}
- {name: west, context: {cluster: open, user: cert}}
- {name: north, context: {cluster: c, user: plugin}}
- {name: gone, context: {cluster: c, user: nobody}}
- {name: gcp, context: {cluster: c, user: old}}
";

    fn from(contexts: &[&str], namespace: Option<&str>) -> Result<Vec<ClusterAccess>, SettingsError> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("c.pem"), "cert").unwrap();
        std::fs::write(dir.path().join("k.pem"), "key").unwrap();
        std::fs::write(dir.path().join("config"), CONFIG).unwrap();
        load(&KubernetesSettings {
            kubeconfig: Some(KubeconfigSource::Filename(dir.path().join("config"))),
            contexts: contexts.iter().map(|&name| name.to_owned()).collect(),
            namespace: namespace.map(str::to_owned),
            ..KubernetesSettings::default()
        })
    }

    #[test]
    fn the_current_context_is_used_unless_others_are_named() {
        let current = from(&[], None).unwrap();
        let [east] = &current[..] else { panic!("one context") };
        assert_eq!((east.name.as_str(), east.namespace.as_str()), ("east", "jobs"));
        assert_eq!(east.authorities.as_deref(), Some(&b"hello"[..]));
        assert!(matches!(&east.login, Login::Token(token) if token == "abc"));
        let named = from(&["west", "north"], None).unwrap();
        let [west, north] = &named[..] else { panic!("two contexts") };
        assert_eq!((west.namespace.as_str(), west.tls_name.as_deref()), ("default", Some("kube")));
        assert_eq!(west.certificate, Some((b"cert".to_vec(), b"key".to_vec())));
        assert!(west.skips_verification && !north.skips_verification);
        assert!(matches!(north.login, Login::Exec(_)));
        assert_eq!(from(&[], Some("mine")).unwrap()[0].namespace, "mine");
    }

    #[test]
    fn what_is_missing_or_not_supported_is_named() {
        for (context, message) in [
            ("south", "it has no entry `south` in `contexts`"),
            ("gone", "it has no entry `nobody` in `users`"),
            ("gcp", "`auth-provider` of users is not supported"),
        ] {
            let error = from(&[context], None).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn the_service_account_of_a_pod_needs_its_variables() {
        let dir = tempfile::tempdir().unwrap();
        let error = in_cluster(dir.path(), &KubernetesSettings::default()).unwrap_err().to_string();
        assert!(error.contains("KUBERNETES_SERVICE_HOST"), "{error}");
    }

    #[test]
    fn the_answer_of_a_plugin_has_a_token_and_perhaps_an_end() {
        let answer = br#"{"status": {"token": "t", "expirationTimestamp": "2026-01-02T03:04:05Z"}}"#;
        let (token, until) = parse_exec_credential(answer).unwrap();
        assert_eq!((token.as_str(), until), ("t", Some("2026-01-02T03:04:05Z".parse().unwrap())));
        assert!(parse_exec_credential(b"{}").unwrap_err().contains("status.token"));
    }
}
