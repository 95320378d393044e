//! Rate limits per caller.
//!
//! Each caller has a token bucket for each kind of operation: it starts full, every call removes one token, and time
//! refills it. Buckets are local to this replica and are dropped when there are too many: they protect the server from
//! runaway loops and from guessed tokens, and account for nothing. Interactive users, and programs that submit
//! thousands of runs, never empty one.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    connection_shares::client_network,
    error::{Error, Result},
};

/// Maximum number of buckets in memory. When it is exceeded, all are dropped and so are full again.
const BUCKETS_MAX: usize = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Number of calls at once.
    pub burst: u32,
    /// Sustained number of calls per second.
    pub per_second: u32,
}

/// Rates for each kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimits {
    /// Wrong tokens, per address.
    pub login: Rate,
    /// Requests that create, change or delete something or plan a run (which may ask a registry), and writes to the
    /// container queue, per user.
    pub submit: Rate,
    /// Requests for logs, per user.
    pub logs: Rate,
}

impl Default for RateLimits {
    fn default() -> Self {
        Self {
            login: Rate { burst: 300, per_second: 20 },
            submit: Rate { burst: 20_000, per_second: 2_000 },
            logs: Rate { burst: 20_000, per_second: 2_000 },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum BucketKey {
    Login(IpAddr),
    Submit(Uuid),
    Logs(Uuid),
}

#[derive(Debug, Default)]
pub struct RateLimiter {
    paces: RateLimits,
    /// Number of tokens missing in each bucket, and the time at which that was computed.
    missing: Mutex<HashMap<BucketKey, (f64, Instant)>>,
}

impl RateLimiter {
    pub fn new(paces: RateLimits) -> Self {
        Self { paces, missing: Mutex::default() }
    }

    /// Returns an error if an address sent too many wrong tokens.
    pub fn check_login(&self, from: IpAddr) -> Result<()> {
        let key = BucketKey::Login(client_network(from));
        let (missing, _) = self.missing(key, self.paces.login);
        if missing < f64::from(self.paces.login.burst) { Ok(()) } else { Err(Error::Fast) }
    }

    /// Counts a wrong token of an address.
    pub fn tried(&self, from: IpAddr) -> Result<()> {
        self.take(BucketKey::Login(client_network(from)), self.paces.login)
    }

    /// Counts an operation of an authenticated user. Operations that only read are unlimited, except those for logs.
    pub fn operation(&self, id: &str, user: Uuid) -> Result<()> {
        match id {
            "apply_run"
            | "plan_run"
            | "stop_runs"
            | "delete_runs"
            | "connect_job"
            | "open_terminal"
            | "redeploy_service"
            | "plan_configuration"
            | "apply_fleet"
            | "delete_fleets"
            | "delete_fleet_instances"
            | "apply_gateway"
            | "create_gateway"
            | "delete_gateways"
            | "set_default_gateway"
            | "set_wildcard_domain"
            | "create_gateway_token"
            | "create_volume"
            | "delete_volumes"
            | "create_project"
            | "update_project"
            | "delete_projects"
            | "set_members"
            | "add_members"
            | "remove_members"
            | "set_member_rights"
            | "grant_backend"
            | "revoke_backend"
            | "create_export"
            | "update_export"
            | "delete_export"
            | "delete_import"
            | "set_budget"
            | "delete_budget"
            | "set_quota"
            | "delete_quota"
            | "set_secret"
            | "delete_secrets"
            | "create_user"
            | "update_user"
            | "delete_users"
            | "refresh_token"
            | "refresh_ssh_key"
            | "create_token"
            | "revoke_tokens"
            | "create_login_code"
            | "revoke_sessions"
            | "add_public_key"
            | "delete_public_keys"
            | "set_view"
            | "delete_view"
            | "init_repo"
            | "delete_repos"
            | "upload_code"
            | "upload_archive"
            | "launch_managed_jobs"
            | "check_managed_jobs"
            | "cancel_managed_jobs"
            | "resume_managed_job" => self.take(BucketKey::Submit(user), self.paces.submit),
            "poll_logs" | "stream_logs" | "read_raw_log" | "search_log" | "read_log_marks" => {
                self.take(BucketKey::Logs(user), self.paces.logs)
            }
            _ => Ok(()),
        }
    }

    /// Counts a write to the container queue, which has no operation id.
    pub fn submits(&self, user: Uuid) -> Result<()> {
        self.take(BucketKey::Submit(user), self.paces.submit)
    }

    fn missing(&self, key: BucketKey, pace: Rate) -> (f64, Instant) {
        let now = Instant::now();
        let known = self.missing.lock().get(&key).copied();
        (known.map_or(0.0, |(missing, then)| remaining_deficit(missing, now - then, pace)), now)
    }

    fn take(&self, key: BucketKey, pace: Rate) -> Result<()> {
        let (missing, now) = self.missing(key, pace);
        if missing + 1.0 > f64::from(pace.burst) {
            return Err(Error::Fast);
        }
        let mut all = self.missing.lock();
        if all.len() >= BUCKETS_MAX {
            all.clear();
        }
        all.insert(key, (missing + 1.0, now));
        Ok(())
    }
}

fn remaining_deficit(missing: f64, since: Duration, pace: Rate) -> f64 {
    (missing - since.as_secs_f64() * f64::from(pace.per_second)).max(0.0)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use windlass_api::Access;

    use super::*;

    fn buckets() -> RateLimiter {
        let pace = Rate { burst: 3, per_second: 2 };
        RateLimiter::new(RateLimits { login: pace, submit: pace, logs: pace })
    }

    #[tokio::test(start_paused = true)]
    async fn a_bucket_allows_a_burst_and_refills_over_time() {
        let buckets = buckets();
        let (mira, noor) = (Uuid::from_u128(1), Uuid::from_u128(2));
        for _ in 0..3 {
            buckets.operation("apply_run", mira).unwrap();
        }
        assert!(matches!(buckets.operation("apply_run", mira), Err(Error::Fast)));
        for id in ["plan_run", "upload_code", "launch_managed_jobs", "set_secret", "create_token"] {
            assert!(matches!(buckets.operation(id, mira), Err(Error::Fast)), "it is the same bucket");
        }
        for id in ["poll_logs", "read_raw_log", "search_log"] {
            buckets.operation(id, mira).unwrap();
        }
        assert!(buckets.operation("read_log_marks", mira).is_err(), "it is the bucket of logs");
        buckets.operation("list_runs", mira).unwrap();
        buckets.operation("apply_run", noor).unwrap();
        tokio::time::advance(Duration::from_millis(500)).await;
        buckets.operation("apply_run", mira).unwrap();
        assert!(buckets.operation("apply_run", mira).is_err());
        tokio::time::advance(Duration::from_secs(3600)).await;
        for _ in 0..3 {
            buckets.operation("apply_run", mira).unwrap();
        }
        assert!(buckets.operation("apply_run", mira).is_err(), "it holds no more than it did");
    }

    #[test]
    fn every_operation_of_users_that_changes_something_is_rate_limited() {
        const READING: [&str; 9] =
            ["check", "compare", "explain", "list", "plan", "query", "read", "search", "stream"];
        let none = Rate { burst: 0, per_second: 0 };
        let limiter = RateLimiter::new(RateLimits { login: none, submit: none, logs: none });
        for operation in windlass_api::operations::table() {
            let verb = operation.id.split('_').next().unwrap();
            // Logins count by address, the current session can be closed once, and gateways are the operator's.
            let is_of_users = !matches!(operation.access, Access::Open | Access::Gateway);
            if is_of_users && !READING.contains(&verb) && operation.id != "close_session" {
                assert!(limiter.operation(operation.id, Uuid::nil()).is_err(), "{}", operation.id);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn ipv6_addresses_of_one_network_share_a_login_limit() {
        let buckets = buckets();
        for last in 0..3_u16 {
            let from = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 7, 0, 0, 0, last));
            buckets.check_login(from).unwrap();
            buckets.tried(from).unwrap();
        }
        let near = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 7, 9, 9, 9, 9));
        let far = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 8, 0, 0, 0, 1));
        assert!(buckets.check_login(near).is_err());
        buckets.check_login(far).unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        buckets.check_login(near).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_buckets_is_bounded() {
        let buckets = buckets();
        for n in 0..2 * BUCKETS_MAX {
            buckets.operation("apply_run", Uuid::from_u128(n as u128)).unwrap();
        }
        assert!(buckets.missing.lock().len() <= BUCKETS_MAX);
    }
}
