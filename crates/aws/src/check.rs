//! Check of the settings and permissions against AWS, for people.

use futures_util::future::join_all;
use windlass_backend::BackendFinding;

use crate::{
    AwsProvider, Image,
    api::Params,
    errors::{ApiError, ErrorClass},
    images::{self, ImageError},
    instances::{INSTANCE_TAG, NAME_TAG},
    prices::{Prices, TABLE_DATE},
};

/// Code of an answer to a call that would have been permitted.
const WOULD_SUCCEED: &str = "DryRunOperation";
/// Ids that no resource has: only the permission is of interest.
const NO_INSTANCE: &str = "i-00000000000000000";
const NO_VOLUME: &str = "vol-00000000000000000";
const NO_GROUP: &str = "sg-00000000000000000";
const NO_IMAGE: &str = "ami-00000000000000000";
const SMALL_TYPE: &str = "t3.micro";

/// Purpose of a permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Required,
    /// Only with certain settings or requests.
    For(&'static str),
}

/// Actions of EC2 that the backend calls, in the order of the policy in the documentation.
const ACTIONS: [(&str, Need); 20] = [
    ("DescribeCapacityReservations", Need::For("capacity reservations")),
    ("DescribeImages", Need::Required),
    ("DescribeInstanceTypeOfferings", Need::Required),
    ("DescribeInstanceTypes", Need::Required),
    ("DescribeInstances", Need::Required),
    ("DescribeRouteTables", Need::Required),
    ("DescribeSecurityGroups", Need::Required),
    ("DescribeSpotPriceHistory", Need::Required),
    ("DescribeSubnets", Need::Required),
    ("DescribeVolumes", Need::For("volumes")),
    ("DescribeVpcs", Need::Required),
    ("RunInstances", Need::Required),
    ("TerminateInstances", Need::Required),
    ("CreateTags", Need::Required),
    ("CreateSecurityGroup", Need::For("a security group that windlass creates")),
    ("AuthorizeSecurityGroupIngress", Need::For("a security group that windlass creates")),
    ("CreateVolume", Need::For("volumes")),
    ("DeleteVolume", Need::For("volumes")),
    ("AttachVolume", Need::For("volumes")),
    ("DetachVolume", Need::For("volumes")),
];

impl AwsProvider {
    pub(crate) async fn findings(&self) -> Vec<BackendFinding> {
        let mut found = vec![self.credentials().await];
        if found.iter().any(|one| one.problem.is_some()) {
            return found;
        }
        let region = self.settings.regions.first().cloned().unwrap_or_default();
        found.extend(
            join_all(ACTIONS.iter().map(|(action, need)| self.permission(&region, action, *need))).await,
        );
        found.extend(join_all(self.settings.regions.iter().map(|region| self.region_finding(region))).await);
        let images = &self.settings.os_images;
        let images = [("cpu", &images.cpu), ("arm", &images.arm), ("nvidia", &images.nvidia)];
        found.extend(join_all(images.map(|(name, image)| self.image_finding(&region, name, image))).await);
        found.push(self.price_finding().await);
        found
    }

    async fn credentials(&self) -> BackendFinding {
        let region = self.settings.regions.first().cloned().unwrap_or_default();
        let source = match self.api.credentials_source().await {
            Ok(source) => source,
            Err(error) => return finding("credentials", Some(error.to_string())),
        };
        match self.api.sts(&region, "GetCallerIdentity").await {
            Ok(answer) => {
                let arn =
                    answer.text("GetCallerIdentityResult/Arn").unwrap_or("an unknown identity").to_owned();
                finding(format!("credentials from {source}: {arn}"), None)
            }
            Err(error) => finding(format!("credentials from {source}"), Some(error.to_string())),
        }
    }

    async fn permission(&self, region: &str, action: &str, need: Need) -> BackendFinding {
        let answer = self.api.ec2(region, action, trial(action)).await;
        let what = match need {
            Need::Required => format!("permission ec2:{action}"),
            Need::For(purpose) => format!("permission ec2:{action}, for {purpose}"),
        };
        finding(what, permission_problem(answer.err(), action))
    }

    async fn region_finding(&self, region: &str) -> BackendFinding {
        match self.network(region).await {
            Ok(network) => {
                let zones: Vec<&str> = network.subnets.keys().map(String::as_str).collect();
                finding(format!("region {region}: VPC {}, zones {}", network.vpc, zones.join(", ")), None)
            }
            Err(error) => finding(format!("region {region}"), Some(error.to_string())),
        }
    }

    async fn image_finding(&self, region: &str, name: &str, image: &Image) -> BackendFinding {
        let what = format!("image `{name}`: {}", images::label(image));
        match self.image(region, image).await {
            Ok(found) => finding(format!("{what}, {}", found.id), None),
            Err(ImageError::Api(error)) if error.class() == ErrorClass::Permission => {
                let problem = format!("{error}; hint: permit `ssm:GetParameter` and `ec2:DescribeImages`");
                finding(what, Some(problem))
            }
            Err(error) => finding(what, Some(format!("{error}; hint: set `os_images`"))),
        }
    }

    async fn price_finding(&self) -> BackendFinding {
        let Some(place) = &self.settings.prices else {
            let what = format!(
                "on-demand prices: a small table of {TABLE_DATE} for a few regions; other offers have no price and sort \
                 last. Set `prices` to a catalogue"
            );
            return finding(what, None);
        };
        match Prices::fetch(self.api.http(), place).await {
            Ok(prices) => {
                let (regions, count) = prices.counts();
                finding(format!("on-demand prices: {count} of {regions} regions in `{place}`"), None)
            }
            Err(error) => finding("on-demand prices", Some(error.to_string())),
        }
    }
}

fn finding(what: impl Into<String>, problem: Option<String>) -> BackendFinding {
    BackendFinding { what: what.into(), problem }
}

/// Parameters of a call that changes nothing.
fn trial(action: &str) -> Params {
    let params = Params::new().with("DryRun", "true");
    let tags = [(NAME_TAG.to_owned(), "windlass".to_owned())];
    match action {
        "RunInstances" => params
            .with("ImageId", NO_IMAGE)
            .with("InstanceType", SMALL_TYPE)
            .with("MinCount", "1")
            .with("MaxCount", "1"),
        "TerminateInstances" => params.with_list("InstanceId", [NO_INSTANCE]),
        "CreateTags" => params
            .with_list("ResourceId", [NO_INSTANCE])
            .with("Tag.1.Key", INSTANCE_TAG)
            .with("Tag.1.Value", "none"),
        "CreateSecurityGroup" => {
            params.with("GroupName", "windlass-check").with("GroupDescription", "check of permissions")
        }
        "AuthorizeSecurityGroupIngress" => params
            .with("GroupId", NO_GROUP)
            .with("IpPermissions.1.IpProtocol", "tcp")
            .with("IpPermissions.1.FromPort", "22")
            .with("IpPermissions.1.ToPort", "22")
            .with("IpPermissions.1.IpRanges.1.CidrIp", "127.0.0.1/32"),
        "CreateVolume" => {
            params.with("AvailabilityZone", "none").with("Size", "1").with_tags("volume", &tags)
        }
        "DeleteVolume" | "DetachVolume" => params.with("VolumeId", NO_VOLUME),
        "AttachVolume" => {
            params.with("VolumeId", NO_VOLUME).with("InstanceId", NO_INSTANCE).with("Device", "/dev/sdf")
        }
        _ => params,
    }
}

/// Returns what is wrong, if AWS refused the call because of its permission. Other refusals are about the ids that do
/// not exist: the permission was there.
fn permission_problem(error: Option<ApiError>, action: &str) -> Option<String> {
    let error = error?;
    match error.class() {
        _ if error.code() == WOULD_SUCCEED => None,
        ErrorClass::NotFound
        | ErrorClass::Invalid
        | ErrorClass::Conflict
        | ErrorClass::NoCapacity
        | ErrorClass::Quota => None,
        ErrorClass::Permission => {
            Some(format!("it is missing; hint: permit `ec2:{action}` in a policy of this identity"))
        }
        ErrorClass::Throttled | ErrorClass::Unavailable | ErrorClass::Credentials => {
            Some(format!("not checked: {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The policy in the documentation permits what is called, and what is checked.
    #[test]
    fn the_documented_policy_permits_each_action() {
        let policy = include_str!("../../../docs/aws-policy.json");
        let policy: serde_json::Value = serde_json::from_str(policy).unwrap();
        let mut permitted = BTreeSet::new();
        for statement in policy["Statement"].as_array().unwrap() {
            let actions = &statement["Action"];
            let listed = actions.as_array().map_or(std::slice::from_ref(actions), Vec::as_slice);
            permitted.extend(listed.iter().map(|action| action.as_str().unwrap()));
        }
        let mut needed: BTreeSet<String> =
            ACTIONS.iter().map(|(action, _)| format!("ec2:{action}")).collect();
        needed.extend(["ssm:GetParameter".to_owned(), "iam:CreateServiceLinkedRole".to_owned()]);
        assert_eq!(permitted, needed.iter().map(String::as_str).collect());
    }

    #[test]
    fn only_a_refusal_because_of_the_permission_is_a_problem() {
        let of = |code: &str, status| {
            let error = ApiError::Answer { status, code: code.to_owned(), message: "m".to_owned() };
            permission_problem(Some(error), "RunInstances")
        };
        assert_eq!(of("DryRunOperation", 412), None);
        assert_eq!(of("InvalidAMIID.NotFound", 400), None);
        assert!(of("UnauthorizedOperation", 403).unwrap().contains("permit `ec2:RunInstances`"));
        assert!(of("InternalError", 500).unwrap().starts_with("not checked"));
        assert_eq!(permission_problem(None, "DescribeVpcs"), None);
    }
}
