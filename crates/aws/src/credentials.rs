//! Credentials: from the settings, the environment, a profile file, a web identity, or the role of the machine.

use std::{path::PathBuf, time::Duration};

use hyper::body::Bytes;
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use tokio::sync::Mutex;
use windlass_sigv4::{AwsCredentials, percent_encode};

use crate::{
    errors::ApiError,
    http::{HttpClient, HttpRequest},
    settings::Creds,
    xml::Element,
};

/// Credentials are replaced so long before they end.
const EXPIRY_MARGIN: SignedDuration = SignedDuration::from_mins(5);
/// A machine that is not on EC2 has no metadata service, and must find out soon.
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
const STS_TIMEOUT: Duration = Duration::from_secs(30);
const METADATA_ORIGIN: &str = "http://169.254.169.254";
const FILE_BYTES_MAX: u64 = 1024 * 1024;
const SESSION_NAME: &str = "windlass";

/// Reads an environment variable.
pub(crate) type Environment = fn(&str) -> Option<String>;

/// Source of credentials, with those that it returned last.
pub(crate) struct CredentialProvider {
    creds: Creds,
    environment: Environment,
    /// Endpoint of all services in tests.
    endpoint: Option<String>,
    /// Region whose security token service is asked.
    region: String,
    /// Held while new ones are fetched, so that they are fetched once.
    known: Mutex<Option<ResolvedCredentials>>,
}

#[derive(Clone)]
struct ResolvedCredentials {
    credentials: AwsCredentials,
    expires: Option<Timestamp>,
    source: String,
}

/// Temporary credentials as the metadata service returns them.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RoleCredentials {
    access_key_id: String,
    secret_access_key: String,
    token: String,
    expiration: Timestamp,
}

impl CredentialProvider {
    pub(crate) fn new(
        creds: Creds,
        environment: Environment,
        endpoint: Option<String>,
        region: String,
    ) -> Self {
        Self { creds, environment, endpoint, region, known: Mutex::default() }
    }

    /// Returns valid credentials.
    pub(crate) async fn get(&self, http: &HttpClient) -> Result<AwsCredentials, ApiError> {
        Ok(self.known(http).await?.credentials)
    }

    /// Says where the credentials come from, for people.
    pub(crate) async fn source(&self, http: &HttpClient) -> Result<String, ApiError> {
        Ok(self.known(http).await?.source)
    }

    async fn known(&self, http: &HttpClient) -> Result<ResolvedCredentials, ApiError> {
        let mut known = self.known.lock().await;
        let is_valid = |known: &&ResolvedCredentials| {
            known.expires.is_none_or(|expires| Timestamp::now() + EXPIRY_MARGIN < expires)
        };
        if let Some(valid) = known.as_ref().filter(is_valid) {
            return Ok(valid.clone());
        }
        let fetched = self.fetch(http).await?;
        *known = Some(fetched.clone());
        Ok(fetched)
    }

    /// Drops credentials that AWS says have expired.
    pub(crate) async fn reject(&self, used: &AwsCredentials) {
        let mut known = self.known.lock().await;
        if known.as_ref().is_some_and(|known| known.credentials.key == used.key) {
            *known = None;
        }
    }

    async fn fetch(&self, http: &HttpClient) -> Result<ResolvedCredentials, ApiError> {
        let fixed = |key: &str, secret: &str, session: Option<String>, source: &str| ResolvedCredentials {
            credentials: AwsCredentials { key: key.to_owned(), secret: secret.to_owned(), session },
            expires: None,
            source: source.to_owned(),
        };
        match &self.creds {
            Creds::AccessKey(keys) => {
                let session = keys.session_token.clone();
                return Ok(fixed(&keys.access_key, &keys.secret_key, session, "`creds` in the settings"));
            }
            Creds::Profile(profile) => {
                let file = profile.file.clone().or_else(|| self.profile_file());
                let missing = || missing("there is no home directory: set `file` in `creds`");
                return self.profile_credentials(&profile.profile, file.ok_or_else(missing)?).await;
            }
            Creds::Default => {}
        }
        let env = |name| (self.environment)(name).filter(|value| !value.is_empty());
        if let (Some(key), Some(secret)) = (env("AWS_ACCESS_KEY_ID"), env("AWS_SECRET_ACCESS_KEY")) {
            return Ok(fixed(&key, &secret, env("AWS_SESSION_TOKEN"), "the environment"));
        }
        if let (Some(file), Some(role)) = (env("AWS_WEB_IDENTITY_TOKEN_FILE"), env("AWS_ROLE_ARN")) {
            return self.web_identity_credentials(http, &file, &role).await;
        }
        let profile = env("AWS_PROFILE");
        if let Some(file) = self.profile_file()
            && (profile.is_some() || tokio::fs::try_exists(&file).await.unwrap_or(false))
        {
            return self.profile_credentials(profile.as_deref().unwrap_or("default"), file).await;
        }
        if env("AWS_EC2_METADATA_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Err(missing(NONE_FOUND));
        }
        self.machine_role_credentials(http).await
    }

    fn profile_file(&self) -> Option<PathBuf> {
        let env = |name| (self.environment)(name).filter(|value| !value.is_empty());
        let home = || Some(PathBuf::from(env("HOME")?).join(".aws/credentials"));
        env("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from).or_else(home)
    }

    async fn profile_credentials(
        &self,
        profile: &str,
        file: PathBuf,
    ) -> Result<ResolvedCredentials, ApiError> {
        let shown = file.display().to_string();
        let text = read_limited(&file)
            .await
            .map_err(|error| missing(&format!("failed to read `{shown}`: {error}")))?;
        let section = profile_section(&text, profile)
            .ok_or_else(|| missing(&format!("`{shown}` has no profile `{profile}`")))?;
        let find = |name: &str| section.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        let (Some(key), Some(secret)) = (find("aws_access_key_id"), find("aws_secret_access_key")) else {
            return Err(missing(&format!(
                "profile `{profile}` of `{shown}` has no `aws_access_key_id` and `aws_secret_access_key`; other kinds of \
                 profiles are not supported"
            )));
        };
        Ok(ResolvedCredentials {
            credentials: AwsCredentials { key, secret, session: find("aws_session_token") },
            // The tools that write temporary keys there replace them: the file is read again soon.
            expires: Some(Timestamp::now() + EXPIRY_MARGIN + SignedDuration::from_mins(5)),
            source: format!("profile `{profile}` of `{shown}`"),
        })
    }

    async fn web_identity_credentials(
        &self,
        http: &HttpClient,
        file: &str,
        role: &str,
    ) -> Result<ResolvedCredentials, ApiError> {
        let token = read_limited(&PathBuf::from(file)).await;
        let token = token.map_err(|error| missing(&format!("failed to read `{file}`: {error}")))?;
        let session = (self.environment)("AWS_ROLE_SESSION_NAME").unwrap_or_else(|| SESSION_NAME.to_owned());
        let body = [
            ("Action", "AssumeRoleWithWebIdentity"),
            ("Version", "2011-06-15"),
            ("RoleArn", role),
            ("RoleSessionName", &session),
            ("WebIdentityToken", token.trim()),
        ]
        .map(|(name, value)| format!("{name}={}", percent_encode(value, false)))
        .join("&");
        let origin = crate::api::origin(self.endpoint.as_deref(), "sts", &self.region);
        let request = HttpRequest {
            origin: &origin,
            method: "POST",
            path: "/",
            headers: &[("content-type", crate::api::FORM)],
            body: Bytes::from(body),
            limit: STS_TIMEOUT,
        };
        let answer = http.send(&request).await?;
        if !answer.is_success() {
            return Err(ApiError::from_xml(answer.status, &answer.text()));
        }
        let unexpected = || ApiError::connection("unexpected answer of the security token service");
        let root = Element::parse(&answer.text()).map_err(|_| unexpected())?;
        let found = root.at("AssumeRoleWithWebIdentityResult/Credentials").ok_or_else(unexpected)?;
        let text = |name| found.text(name).map(str::to_owned).ok_or_else(unexpected);
        Ok(ResolvedCredentials {
            credentials: AwsCredentials {
                key: text("AccessKeyId")?,
                secret: text("SecretAccessKey")?,
                session: Some(text("SessionToken")?),
            },
            expires: Some(text("Expiration")?.parse().map_err(|_| unexpected())?),
            source: format!("the web identity in `{file}`"),
        })
    }

    async fn machine_role_credentials(&self, http: &HttpClient) -> Result<ResolvedCredentials, ApiError> {
        let origin = (self.environment)("AWS_EC2_METADATA_SERVICE_ENDPOINT");
        role_of_machine(http, origin.as_deref().unwrap_or(METADATA_ORIGIN).trim_end_matches('/')).await
    }
}

/// Asks the metadata service of the machine, version 2.
async fn role_of_machine(http: &HttpClient, origin: &str) -> Result<ResolvedCredentials, ApiError> {
    let send = async |method, path: &str, headers: &[(&str, &str)]| {
        let request =
            HttpRequest { origin, method, path, headers, body: Bytes::new(), limit: METADATA_TIMEOUT };
        let answer = http.send(&request).await.map_err(|_| missing(NONE_FOUND))?;
        match answer.is_success() {
            true => Ok(answer),
            false => Err(missing("this machine has no role, and no other credentials were found")),
        }
    };
    let token = send("PUT", "/latest/api/token", &[("x-aws-ec2-metadata-token-ttl-seconds", "300")]).await?;
    let token = token.text().trim().to_owned();
    let headers = [("x-aws-ec2-metadata-token", token.as_str())];
    let root = "/latest/meta-data/iam/security-credentials/";
    let role = send("GET", root, &headers).await?.text().lines().next().unwrap_or_default().to_owned();
    let answer = send("GET", &format!("{root}{role}"), &headers).await?;
    let found: RoleCredentials = serde_json::from_slice(&answer.body).map_err(|error| {
        ApiError::connection(format!("unexpected answer of the metadata service: {error}"))
    })?;
    Ok(ResolvedCredentials {
        credentials: AwsCredentials {
            key: found.access_key_id,
            secret: found.secret_access_key,
            session: Some(found.token),
        },
        expires: Some(found.expiration),
        source: format!("the role `{role}` of this machine"),
    })
}

const NONE_FOUND: &str = "no credentials were found: expected `creds` in the settings, `AWS_ACCESS_KEY_ID` and \
                          `AWS_SECRET_ACCESS_KEY`, a web identity, a profile file, or a machine with a role";

fn missing(message: &str) -> ApiError {
    ApiError::Credentials { message: message.to_owned() }
}

async fn read_limited(file: &std::path::Path) -> std::io::Result<String> {
    use tokio::io::AsyncReadExt as _;
    let mut text = String::new();
    tokio::fs::File::open(file).await?.take(FILE_BYTES_MAX).read_to_string(&mut text).await?;
    Ok(text)
}

/// Returns the settings of a section of a credentials file; `None` if there is no such section.
fn profile_section(text: &str, profile: &str) -> Option<Vec<(String, String)>> {
    let mut found = None;
    let mut is_wanted = false;
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(section) = line.strip_prefix('[') {
            let name = section.trim_end_matches(']').trim();
            is_wanted = name.strip_prefix("profile ").unwrap_or(name).trim() == profile;
            if is_wanted {
                found.get_or_insert_with(Vec::new);
            }
        } else if let (true, Some((key, value))) = (is_wanted, line.split_once('=')) {
            found.get_or_insert_with(Vec::new).push((key.trim().to_owned(), value.trim().to_owned()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;
    use crate::settings::{AccessKey, Profile};

    fn provider(creds: Creds, environment: Environment, endpoint: Option<String>) -> CredentialProvider {
        CredentialProvider::new(creds, environment, endpoint, "us-east-1".into())
    }

    async fn known(creds: Creds, environment: Environment) -> Result<ResolvedCredentials, String> {
        let http = HttpClient::default();
        provider(creds, environment, None).known(&http).await.map_err(|error| error.to_string())
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    /// Answers each request, of which it returns the text, by its first line. Closes each connection.
    async fn serve(
        answers: &'static [(&'static str, &'static str)],
    ) -> (String, tokio::task::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let origin = format!("http://{}", listener.local_addr().unwrap());
        let served = tokio::spawn(async move {
            let mut requests = Vec::new();
            for (start, answer) in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = String::new();
                let mut buffer = [0; 4096];
                // The requests are small: headers and body together come at once, or body by body.
                while !request.contains("\r\n\r\n")
                    || (request.starts_with("POST") && !request.contains("Action="))
                {
                    let read = stream.read(&mut buffer).await.unwrap();
                    request.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
                }
                assert!(request.starts_with(start), "{request}");
                let answer = format!(
                    "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{answer}",
                    answer.len()
                );
                stream.write_all(answer.as_bytes()).await.unwrap();
                requests.push(request);
            }
            requests
        });
        (origin, served)
    }

    #[tokio::test]
    async fn keys_of_the_settings_and_of_the_environment_are_used_as_they_are() {
        let keys = AccessKey { access_key: "AK".into(), secret_key: "S".into(), session_token: None };
        let found = known(Creds::AccessKey(keys), |_| None).await.unwrap();
        assert_eq!((found.credentials.key.as_str(), found.credentials.session), ("AK", None));
        let environment = |name: &str| match name {
            "AWS_ACCESS_KEY_ID" => Some("E".to_owned()),
            "AWS_SECRET_ACCESS_KEY" => Some("S".to_owned()),
            "AWS_SESSION_TOKEN" => Some("T".to_owned()),
            _ => None,
        };
        let found = known(Creds::Default, environment).await.unwrap();
        assert_eq!((found.credentials.key.as_str(), found.credentials.session.as_deref()), ("E", Some("T")));
        assert_eq!(found.source, "the environment");
    }

    #[tokio::test]
    async fn a_profile_is_read_from_its_section() {
        let file = file(
            "[default]\naws_access_key_id = no\n# [lab]\n[lab]\naws_access_key_id = AK\naws_secret_access_key=a=b\n\
             aws_session_token = T\n[half]\naws_access_key_id = x\n",
        );
        let of = |profile: &str| {
            Creds::Profile(Profile { profile: profile.to_owned(), file: Some(file.path().to_owned()) })
        };
        let found = known(of("lab"), |_| None).await.unwrap();
        assert_eq!(found.credentials.key, "AK");
        assert_eq!(found.credentials.secret, "a=b");
        assert_eq!(found.credentials.session.as_deref(), Some("T"));
        let error = known(of("none"), |_| None).await.err().unwrap();
        assert!(error.contains("has no profile `none`"), "{error}");
        let error = known(of("half"), |_| None).await.err().unwrap();
        assert!(error.contains("`aws_secret_access_key`"), "{error}");
    }

    #[tokio::test]
    async fn a_machine_without_any_credentials_says_what_was_expected() {
        let environment = |name: &str| (name == "AWS_EC2_METADATA_DISABLED").then(|| "true".to_owned());
        let error = known(Creds::Default, environment).await.err().unwrap();
        assert!(error.contains("a web identity, a profile file, or a machine with a role"), "{error}");
    }

    #[tokio::test]
    async fn the_role_of_the_machine_is_read_with_a_session_token() {
        let (origin, served) = serve(&[
            ("PUT /latest/api/token ", "session"),
            ("GET /latest/meta-data/iam/security-credentials/ ", "windlass-role"),
            (
                "GET /latest/meta-data/iam/security-credentials/windlass-role ",
                r#"{"AccessKeyId": "AK", "SecretAccessKey": "S", "Token": "T", "Expiration": "2999-01-01T00:00:00Z"}"#,
            ),
        ])
        .await;
        let role = role_of_machine(&HttpClient::default(), &origin).await.unwrap();
        assert_eq!((role.credentials.key.as_str(), role.credentials.session.as_deref()), ("AK", Some("T")));
        assert!(role.source.contains("windlass-role"), "{}", role.source);
        let requests = served.await.unwrap();
        assert!(requests[0].contains("x-aws-ec2-metadata-token-ttl-seconds"), "{requests:?}");
        assert!(requests[2].contains("x-aws-ec2-metadata-token: session"), "{requests:?}");
    }

    #[tokio::test]
    async fn a_web_identity_is_exchanged_without_a_signature() {
        let (origin, served) = serve(&[(
            "POST / ",
            "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\
             <AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>AK</AccessKeyId><SecretAccessKey>S\
             </SecretAccessKey><SessionToken>T</SessionToken><Expiration>2999-01-01T00:00:00Z</Expiration></Credentials>\
             </AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>",
        )])
        .await;
        let file = file("a.b/c\n");
        let http = HttpClient::default();
        let chain = provider(Creds::Default, |_| None, Some(origin));
        let path = file.path().to_str().unwrap();
        let found = chain.web_identity_credentials(&http, path, "arn:aws:iam::1:role/w").await.unwrap();
        assert_eq!((found.credentials.key.as_str(), found.credentials.session.as_deref()), ("AK", Some("T")));
        let requests = served.await.unwrap();
        assert!(requests[0].contains("WebIdentityToken=a.b%2Fc"), "{requests:?}");
        assert!(!requests[0].to_lowercase().contains("authorization:"), "{requests:?}");
    }
}
