//! Check of the settings against LXD, for people.

use serde_json::Value;

use super::{
    client::{ApiError, Client, percent_encode},
    settings::Settings,
};
use crate::BackendFinding;

pub(super) async fn findings(settings: &Settings, client: &Client) -> Vec<BackendFinding> {
    let mut found = Vec::new();
    let server = client.get("/1.0").await;
    let untrusted = matches!(&server, Ok(server) if server["auth"] != "trusted");
    let problem = match &server {
        Err(error) => Some(error.to_string()),
        Ok(_) if untrusted => Some(
            "LXD does not trust the client certificate; hint: `lxc config trust add CERTIFICATE` there"
                .to_owned(),
        ),
        Ok(_) => None,
    };
    let unusable = problem.is_some();
    found.push(BackendFinding { what: format!("the API{}", version(server.as_ref().ok())), problem });
    if unusable {
        return found;
    }
    let encoded = |name: &str| percent_encode(name).replace('/', "%2F");
    let mut needs = vec![
        (
            format!("project `{}`", settings.project),
            format!("/1.0/projects/{}", encoded(&settings.project)),
            format!("create it with `lxc project create {}`, or set `project`", settings.project),
        ),
        (
            format!("image `{}`", settings.image),
            format!("/1.0/images/aliases/{}", encoded(&settings.image)),
            format!("`lxc image copy SOURCE local: --alias {}` adds one", settings.image),
        ),
    ];
    for profile in &settings.profiles {
        needs.push((
            format!("profile `{profile}`"),
            format!("/1.0/profiles/{}", encoded(profile)),
            format!("create it with `lxc profile create {profile}`, or set `profiles`"),
        ));
    }
    needs.push((
        format!("storage pool `{}`", settings.storage_pool),
        format!("/1.0/storage-pools/{}", encoded(&settings.storage_pool)),
        "set `storage_pool`; `lxc storage list` shows those that exist".to_owned(),
    ));
    for (what, path, hint) in needs {
        found.push(BackendFinding { what, problem: missing(client.get(&path).await, &hint) });
    }
    found.push(devices(settings, client).await);
    found.push(BackendFinding {
        what: "the host's resources".to_owned(),
        problem: client.get("/1.0/resources").await.err().map(|error| error.to_string()),
    });
    found
}

fn version(server: Option<&Value>) -> String {
    let environment = server.map(|server| &server["environment"]);
    let words = ["server", "server_version"].map(|key| environment.and_then(|about| about[key].as_str()));
    match words {
        [Some(name), Some(version)] => format!(" of {name} {version}"),
        _ => String::new(),
    }
}

/// Returns what is wrong with a thing that was looked up.
fn missing(answer: Result<Value, ApiError>, hint: &str) -> Option<String> {
    match answer {
        Ok(_) => None,
        Err(error) if error.is_not_found() => Some(format!("it does not exist; hint: {hint}")),
        Err(error) => Some(error.to_string()),
    }
}

/// The profiles together must give a machine a root disk and a network interface.
async fn devices(settings: &Settings, client: &Client) -> BackendFinding {
    let (mut root, mut nic) = (false, false);
    for profile in &settings.profiles {
        let path = format!("/1.0/profiles/{}", percent_encode(profile).replace('/', "%2F"));
        let Ok(shown) = client.get(&path).await else { continue };
        for device in shown["devices"].as_object().into_iter().flatten().map(|(_, device)| device) {
            root |= device["type"] == "disk" && device["path"] == "/";
            nic |= device["type"] == "nic";
        }
    }
    let missing: Vec<&str> = [(root, "root disk"), (nic, "network interface")]
        .iter()
        .filter(|(has, _)| !has)
        .map(|(_, what)| *what)
        .collect();
    let problem = (!missing.is_empty()).then(|| {
        format!("they define no {}; hint: `lxc profile device add` adds devices", missing.join(" and no "))
    });
    BackendFinding { what: "devices of the profiles".to_owned(), problem }
}
