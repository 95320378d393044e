//! Calls to AWS: signed, repeated while AWS limits their rate, and with all pages of their answers.

use std::time::Duration;

use hyper::body::Bytes;
use tokio::time::sleep;
use windlass_sigv4::{
    AwsCredentials, CanonicalRequest, Scope, amz_date, authorization, percent_encode, sha256_hex,
};

use crate::{
    credentials::{CredentialProvider, Environment},
    errors::{ApiError, ErrorClass},
    http::{HttpAnswer, HttpClient, HttpRequest},
    settings::Settings,
    xml::Element,
};

pub(crate) const FORM: &str = "application/x-www-form-urlencoded; charset=utf-8";
const JSON: &str = "application/x-amz-json-1.1";
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
const EC2_VERSION: &str = "2016-11-15";
const STS_VERSION: &str = "2011-06-15";
/// Attempts of a call whose connection fails, or that fails at AWS.
const ATTEMPTS_MAX: u32 = 4;
/// Attempts of a call that AWS refuses because of its rate: together about 12 s.
const THROTTLED_ATTEMPTS_MAX: u32 = 7;
const RETRY_DELAY: Duration = Duration::from_millis(200);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(5);

/// Parameters of a call, in the form of the query protocol.
#[derive(Clone, Debug, Default)]
pub(crate) struct Params(Vec<(String, String)>);

impl Params {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    #[must_use]
    pub(crate) fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.push((name.into(), value.into()));
        self
    }

    /// Adds `name.1`, `name.2`, …
    #[must_use]
    pub(crate) fn with_list<V: Into<String>>(
        mut self,
        name: &str,
        values: impl IntoIterator<Item = V>,
    ) -> Self {
        for (index, value) in values.into_iter().enumerate() {
            self.0.push((format!("{name}.{}", index + 1), value.into()));
        }
        self
    }

    /// Adds a filter of a `Describe…` call.
    #[must_use]
    pub(crate) fn with_filter<V: Into<String>>(
        self,
        name: &str,
        values: impl IntoIterator<Item = V>,
    ) -> Self {
        let used = self.0.iter().filter(|(key, _)| key.starts_with("Filter.") && key.ends_with(".Name"));
        let at = used.count() + 1;
        self.with(format!("Filter.{at}.Name"), name).with_list(&format!("Filter.{at}.Value"), values)
    }

    /// Adds tags for a resource that is created.
    #[must_use]
    pub(crate) fn with_tags(mut self, resource: &str, tags: &[(String, String)]) -> Self {
        let used = self.0.iter().filter(|(key, _)| key.ends_with(".ResourceType")).count();
        let at = format!("TagSpecification.{}", used + 1);
        self = self.with(format!("{at}.ResourceType"), resource);
        for (index, (key, value)) in tags.iter().enumerate() {
            let tag = format!("{at}.Tag.{}", index + 1);
            self = self.with(format!("{tag}.Key"), key).with(format!("{tag}.Value"), value);
        }
        self
    }

    pub(crate) fn encoded(&self) -> String {
        let pair = |(name, value): &(String, String)| {
            format!("{}={}", percent_encode(name, false), percent_encode(value, false))
        };
        self.0.iter().map(pair).collect::<Vec<_>>().join("&")
    }
}

/// URL of a service in a region. Tests have one endpoint for all.
pub(crate) fn origin(endpoint: Option<&str>, service: &str, region: &str) -> String {
    let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
    endpoint.map_or_else(|| format!("https://{service}.{region}.{domain}"), str::to_owned)
}

/// Call to one service.
struct Call<'a> {
    service: &'a str,
    region: &'a str,
    content_type: &'a str,
    /// Action of the JSON protocol.
    target: Option<&'a str>,
    body: String,
}

pub(crate) struct Api {
    http: HttpClient,
    credentials: CredentialProvider,
    endpoint: Option<String>,
}

impl Api {
    pub(crate) fn http(&self) -> &HttpClient {
        &self.http
    }

    pub(crate) fn new(settings: &Settings, environment: Environment) -> Self {
        let endpoint = settings.endpoint.as_deref().map(|url| url.trim_end_matches('/').to_owned());
        let region = settings.regions.first().cloned().unwrap_or_default();
        Self {
            http: HttpClient::default(),
            credentials: CredentialProvider::new(
                settings.creds.clone(),
                environment,
                endpoint.clone(),
                region,
            ),
            endpoint,
        }
    }

    /// Says where the credentials come from.
    pub(crate) async fn credentials_source(&self) -> Result<String, ApiError> {
        self.credentials.source(&self.http).await
    }

    /// Calls an action of EC2. Every action that changes something is one that may be repeated.
    pub(crate) async fn ec2(&self, region: &str, action: &str, params: Params) -> Result<Element, ApiError> {
        self.query("ec2", EC2_VERSION, region, action, params).await
    }

    /// Calls an action of the security token service.
    pub(crate) async fn sts(&self, region: &str, action: &str) -> Result<Element, ApiError> {
        self.query("sts", STS_VERSION, region, action, Params::new()).await
    }

    async fn query(
        &self,
        service: &str,
        version: &str,
        region: &str,
        action: &str,
        params: Params,
    ) -> Result<Element, ApiError> {
        let mut all = Params::new().with("Action", action).with("Version", version);
        all.0.extend(params.0);
        let call = Call { service, region, content_type: FORM, target: None, body: all.encoded() };
        let answer = self.send(&call).await?;
        Element::parse(&answer.text())
            .map_err(|error| ApiError::connection(format!("unexpected answer to {action}: {error}")))
    }

    /// Entries of a list, of all pages.
    pub(crate) async fn list(
        &self,
        region: &str,
        action: &str,
        params: Params,
        list: &str,
    ) -> Result<Vec<Element>, ApiError> {
        let mut all = Vec::new();
        let mut token: Option<String> = None;
        loop {
            let page = match &token {
                Some(token) => params.clone().with("NextToken", token),
                None => params.clone(),
            };
            let answer = self.ec2(region, action, page).await?;
            all.extend(answer.items(list).cloned());
            match answer.text("nextToken") {
                Some(next) if token.as_deref() != Some(next) => token = Some(next.to_owned()),
                Some(_) | None => return Ok(all),
            }
        }
    }

    /// Value of a parameter of Systems Manager, where AWS and others publish their images.
    pub(crate) async fn parameter(&self, region: &str, name: &str) -> Result<String, ApiError> {
        let call = Call {
            service: "ssm",
            region,
            content_type: JSON,
            target: Some("AmazonSSM.GetParameter"),
            body: serde_json::json!({ "Name": name }).to_string(),
        };
        let answer = self.send(&call).await?;
        let value: serde_json::Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        let value = value["Parameter"]["Value"].as_str().map(str::to_owned);
        value.ok_or_else(|| ApiError::connection("unexpected answer to GetParameter"))
    }

    /// Sends a call until it is answered, within limits.
    async fn send(&self, call: &Call<'_>) -> Result<HttpAnswer, ApiError> {
        let mut attempts = 0;
        let mut is_renewed = false;
        loop {
            let credentials = self.credentials.get(&self.http).await?;
            let error = match self.send_once(call, &credentials).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            attempts += 1;
            let attempts_max = match error.class() {
                ErrorClass::Throttled => THROTTLED_ATTEMPTS_MAX,
                ErrorClass::Unavailable => ATTEMPTS_MAX,
                ErrorClass::Credentials if error.is_expired() && !is_renewed => {
                    is_renewed = true;
                    self.credentials.reject(&credentials).await;
                    continue;
                }
                ErrorClass::NoCapacity
                | ErrorClass::Quota
                | ErrorClass::Credentials
                | ErrorClass::Permission
                | ErrorClass::NotFound
                | ErrorClass::Conflict
                | ErrorClass::Invalid => return Err(error),
            };
            if attempts >= attempts_max {
                return Err(error);
            }
            sleep(retry_delay(attempts)).await;
        }
    }

    async fn send_once(&self, call: &Call<'_>, credentials: &AwsCredentials) -> Result<HttpAnswer, ApiError> {
        let origin = origin(self.endpoint.as_deref(), call.service, call.region);
        let (time, host) = (amz_date(), self.http.authority(&origin)?);
        let mut headers = vec![("content-type", call.content_type), ("x-amz-date", &time)];
        if let Some(session) = &credentials.session {
            headers.push(("x-amz-security-token", session));
        }
        if let Some(target) = call.target {
            headers.push(("x-amz-target", target));
        }
        let mut signed = headers.clone();
        signed.push(("host", &host));
        let body_hash = sha256_hex(call.body.as_bytes());
        let canonical = CanonicalRequest {
            method: "POST",
            path: "/",
            query: &[],
            headers: &signed,
            body_hash: &body_hash,
        };
        let scope = Scope { region: call.region, service: call.service };
        let authorization = authorization(credentials, scope, &time, &canonical);
        headers.push(("authorization", &authorization));
        let request = HttpRequest {
            origin: &origin,
            method: "POST",
            path: "/",
            headers: &headers,
            body: Bytes::from(call.body.clone()),
            limit: ANSWER_TIMEOUT,
        };
        let answer = self.http.send(&request).await?;
        match (answer.is_success(), call.target) {
            (true, _) => Ok(answer),
            (false, None) => Err(ApiError::from_xml(answer.status, &answer.text())),
            (false, Some(_)) => Err(ApiError::from_json(answer.status, &answer.body)),
        }
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// Doubles with each attempt, and differs between callers by up to a half, so that they do not all return at once.
fn retry_delay(attempts: u32) -> Duration {
    let delay = (RETRY_DELAY * 2_u32.saturating_pow(attempts.saturating_sub(1))).min(RETRY_DELAY_MAX);
    let mut random = [0];
    // Without random bytes the callers only return together.
    let _ = getrandom::fill(&mut random);
    delay / 2 + delay / 2 * u32::from(random[0]) / 255
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_numbered_and_encoded() {
        let params = Params::new()
            .with_filter("tag:a", ["x y"])
            .with_filter("vpc-id", ["1", "2"])
            .with_tags("instance", &[("k".into(), "v+".into())])
            .with_tags("volume", &[]);
        assert_eq!(
            params.encoded(),
            "Filter.1.Name=tag%3Aa&Filter.1.Value.1=x%20y&Filter.2.Name=vpc-id&Filter.2.Value.1=1&Filter.2.Value.2=2\
             &TagSpecification.1.ResourceType=instance&TagSpecification.1.Tag.1.Key=k&TagSpecification.1.Tag.1.Value=v%2B\
             &TagSpecification.2.ResourceType=volume"
        );
    }

    #[test]
    fn endpoints_follow_the_region() {
        assert_eq!(origin(None, "ec2", "eu-west-1"), "https://ec2.eu-west-1.amazonaws.com");
        assert_eq!(origin(None, "sts", "cn-north-1"), "https://sts.cn-north-1.amazonaws.com.cn");
        assert_eq!(origin(Some("http://[::1]:5"), "ssm", "eu-west-1"), "http://[::1]:5");
    }

    #[test]
    fn delays_double_up_to_a_maximum() {
        for (attempts, most) in [(1, 200), (2, 400), (4, 1600), (40, 5000)] {
            let delay = retry_delay(attempts).as_millis();
            assert!((most / 2..=most).contains(&delay), "{attempts}: {delay} of {most}");
        }
    }
}
