//! Networks of a region: the VPC, a subnet for each zone, and the security group of the machines.

use std::collections::{BTreeMap, BTreeSet};

use windlass_backend::BackendError;

use crate::{
    api::{Api, Params},
    errors::{ApiError, ErrorClass},
    settings::Settings,
    xml::Element,
};

/// Protocol number that means all protocols.
const ALL_PROTOCOLS: &str = "-1";
const SSH_PORT: &str = "22";
/// Tag of a group that windlass created.
const MANAGED_TAG: &str = "windlass-managed";
/// Number of rules of such a group.
const RULES: usize = 2;
const DEFAULT_ROUTE: &str = "0.0.0.0/0";

/// Network of a region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RegionNetwork {
    pub(crate) vpc: String,
    /// Subnet by its zone.
    pub(crate) subnets: BTreeMap<String, String>,
}

/// Reason why a region has no network for machines.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum NetworkError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("{message}")]
    Missing { message: String },
}

impl NetworkError {
    pub(crate) fn to_backend(&self, what: &'static str) -> BackendError {
        match self {
            Self::Api(error) => error.to_backend(what),
            Self::Missing { message } => BackendError::Refused { what, message: message.clone() },
        }
    }
}

impl RegionNetwork {
    pub(crate) async fn fetch(api: &Api, settings: &Settings, region: &str) -> Result<Self, NetworkError> {
        let missing = |message: String| NetworkError::Missing { message };
        let wanted = settings.vpc_ids.get(region);
        let query = match (wanted, &settings.vpc_name) {
            (Some(id), _) => Params::new().with_filter("vpc-id", [id]),
            (None, Some(name)) => Params::new().with_filter("tag:Name", [name]),
            (None, None) => Params::new().with_filter("is-default", ["true"]),
        };
        let found = api.list(region, "DescribeVpcs", query, "vpcSet").await?;
        let mut ids = found.iter().filter_map(|vpc| vpc.text("vpcId"));
        let vpc = match (ids.next(), ids.next(), wanted, &settings.vpc_name) {
            (Some(id), None, _, _) => id.to_owned(),
            (Some(_), Some(_), _, name) => {
                let name = name.as_deref().unwrap_or_default();
                return Err(missing(format!("region {region} has several VPCs with the name `{name}`")));
            }
            (None, _, Some(id), _) => return Err(missing(format!("region {region} has no VPC `{id}`"))),
            (None, _, None, Some(name)) => {
                return Err(missing(format!("region {region} has no VPC with the name `{name}`")));
            }
            (None, _, None, None) => {
                return Err(missing(format!(
                    "region {region} has no default VPC; hint: set `vpc_ids`, or remove it from `regions`"
                )));
            }
        };
        let in_vpc = || Params::new().with_filter("vpc-id", [&vpc]);
        let (subnets, tables) = futures_util::future::try_join(
            api.list(region, "DescribeSubnets", in_vpc(), "subnetSet"),
            api.list(region, "DescribeRouteTables", in_vpc(), "routeTableSet"),
        )
        .await?;
        let subnets = choose_subnets(&subnets, &tables, settings.public_ips);
        if subnets.is_empty() {
            let kind =
                if settings.public_ips { "public subnet" } else { "private subnet with a route outside" };
            return Err(missing(format!(
                "VPC {vpc} of region {region} has no {kind}; hint: see `public_ips`"
            )));
        }
        Ok(Self { vpc, subnets })
    }
}

/// Chooses a subnet of each zone: the one with the most free addresses among those that can be used.
fn choose_subnets(subnets: &[Element], tables: &[Element], public: bool) -> BTreeMap<String, String> {
    let routes = Routes::read(tables);
    let mut best: BTreeMap<String, (u64, String)> = BTreeMap::new();
    for subnet in subnets {
        let (Some(id), Some(zone)) = (subnet.text("subnetId"), subnet.text("availabilityZone")) else {
            continue;
        };
        let is_usable = match public {
            true => routes.leads_to_internet(id),
            false => routes.leads_outside(id) && !routes.leads_to_internet(id),
        };
        let free = subnet.number("availableIpAddressCount").unwrap_or_default();
        let is_better = best.get(zone).is_none_or(|(most, known)| (free, id) > (*most, known.as_str()));
        if is_usable && free > 0 && is_better {
            best.insert(zone.to_owned(), (free, id.to_owned()));
        }
    }
    best.into_iter().map(|(zone, (_, id))| (zone, id)).collect()
}

/// Destinations of packets for other networks, from the route tables of a VPC.
#[derive(Debug, Default)]
struct Routes {
    /// Subnets with a separate table.
    explicit: BTreeSet<String>,
    internet: BTreeSet<String>,
    outside: BTreeSet<String>,
    main_internet: bool,
    main_outside: bool,
}

impl Routes {
    fn read(tables: &[Element]) -> Self {
        let mut routes = Self::default();
        for table in tables {
            let defaults = || {
                table.items("routeSet").filter(|route| {
                    route.text("destinationCidrBlock") == Some(DEFAULT_ROUTE)
                        && route.text("state") != Some("blackhole")
                })
            };
            let internet =
                defaults().any(|route| route.text("gatewayId").is_some_and(|id| id.starts_with("igw-")));
            let outside = defaults().next().is_some();
            for association in table.items("associationSet") {
                if association.is_true("main") {
                    routes.main_internet |= internet;
                    routes.main_outside |= outside;
                }
                if let Some(subnet) = association.text("subnetId") {
                    routes.explicit.insert(subnet.to_owned());
                    if internet {
                        routes.internet.insert(subnet.to_owned());
                    }
                    if outside {
                        routes.outside.insert(subnet.to_owned());
                    }
                }
            }
        }
        routes
    }

    fn leads_to_internet(&self, subnet: &str) -> bool {
        if self.explicit.contains(subnet) { self.internet.contains(subnet) } else { self.main_internet }
    }

    fn leads_outside(&self, subnet: &str) -> bool {
        if self.explicit.contains(subnet) { self.outside.contains(subnet) } else { self.main_outside }
    }
}

/// Finds the security group of a VPC by its name, or creates it: SSH from outside, everything between the machines.
///
/// A group that exists already is used as it is.
pub(crate) async fn security_group(
    api: &Api,
    settings: &Settings,
    region: &str,
    vpc: &str,
) -> Result<String, ApiError> {
    let name = &settings.security_group;
    let group = match find_group(api, region, vpc, name).await? {
        Some(group) => group,
        None => {
            let tags = [("Name".to_owned(), name.clone()), (MANAGED_TAG.to_owned(), "true".to_owned())];
            let create = Params::new()
                .with("GroupName", name)
                .with("GroupDescription", "Machines of windlass")
                .with("VpcId", vpc)
                .with_tags("security-group", &tags);
            match api.ec2(region, "CreateSecurityGroup", create).await {
                Ok(_) => {}
                // Another request was faster.
                Err(error) if error.class() == ErrorClass::Conflict => {}
                Err(error) => return Err(error),
            }
            let not_listed = || ApiError::connection(format!("security group `{name}` is not listed yet"));
            find_group(api, region, vpc, name).await?.ok_or_else(not_listed)?
        }
    };
    let unexpected = || ApiError::connection(format!("security group `{name}` has no id"));
    let id = group.text("groupId").ok_or_else(unexpected)?.to_owned();
    // A server that ended after the creation has left a group without rules.
    if group.tag(MANAGED_TAG).is_some() && group.items("ipPermissions").count() < RULES {
        authorize(api, region, &id, ssh_rule(&settings.ssh_sources)).await?;
        authorize(api, region, &id, own_rule(&id)).await?;
    }
    Ok(id)
}

async fn find_group(api: &Api, region: &str, vpc: &str, name: &str) -> Result<Option<Element>, ApiError> {
    let query = Params::new().with_filter("vpc-id", [vpc]).with_filter("group-name", [name]);
    let found = api.list(region, "DescribeSecurityGroups", query, "securityGroupInfo").await?;
    Ok(found.into_iter().next())
}

fn ssh_rule(sources: &[String]) -> Params {
    let mut rule = Params::new()
        .with("IpPermissions.1.IpProtocol", "tcp")
        .with("IpPermissions.1.FromPort", SSH_PORT)
        .with("IpPermissions.1.ToPort", SSH_PORT);
    for (index, source) in sources.iter().enumerate() {
        let (list, key) =
            if source.contains(':') { ("Ipv6Ranges", "CidrIpv6") } else { ("IpRanges", "CidrIp") };
        rule = rule.with(format!("IpPermissions.1.{list}.{}.{key}", index + 1), source);
    }
    rule
}

/// Nodes of one run talk to each other.
fn own_rule(group: &str) -> Params {
    Params::new()
        .with("IpPermissions.1.IpProtocol", ALL_PROTOCOLS)
        .with("IpPermissions.1.Groups.1.GroupId", group)
}

async fn authorize(api: &Api, region: &str, group: &str, rule: Params) -> Result<(), ApiError> {
    match api.ec2(region, "AuthorizeSecurityGroupIngress", rule.with("GroupId", group)).await {
        Ok(_) => Ok(()),
        Err(error) if error.class() == ErrorClass::Conflict => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(text: &str) -> Vec<Element> {
        Element::parse(&format!("<r><set>{text}</set></r>")).unwrap().items("set").cloned().collect()
    }

    fn subnet(id: &str, zone: &str, free: u32) -> String {
        format!(
            "<item><subnetId>{id}</subnetId><availabilityZone>{zone}</availabilityZone>\
             <availableIpAddressCount>{free}</availableIpAddressCount></item>"
        )
    }

    fn table(association: &str, target: &str) -> String {
        format!(
            "<item><associationSet><item>{association}</item></associationSet><routeSet><item>\
             <destinationCidrBlock>10.0.0.0/8</destinationCidrBlock><gatewayId>local</gatewayId></item><item>\
             <destinationCidrBlock>0.0.0.0/0</destinationCidrBlock>{target}</item></routeSet></item>"
        )
    }

    #[test]
    fn subnets_are_chosen_by_their_routes_and_free_addresses() {
        let subnets = items(
            &[
                subnet("public", "eu-1a", 50),
                subnet("larger", "eu-1a", 90),
                subnet("full", "eu-1b", 0),
                subnet("nat", "eu-1a", 99),
                subnet("closed", "eu-1b", 99),
            ]
            .concat(),
        );
        let main = table("<main>true</main>", "<gatewayId>igw-1</gatewayId>");
        let nat = table("<main>false</main><subnetId>nat</subnetId>", "<natGatewayId>nat-1</natGatewayId>");
        let closed = "<item><associationSet><item><subnetId>closed</subnetId></item></associationSet></item>";
        let tables = items(&format!("{main}{nat}{closed}"));
        let of = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(zone, id)| ((*zone).to_owned(), (*id).to_owned())).collect()
        };
        assert_eq!(choose_subnets(&subnets, &tables, true), of(&[("eu-1a", "larger")]));
        assert_eq!(choose_subnets(&subnets, &tables, false), of(&[("eu-1a", "nat")]));
    }
}
