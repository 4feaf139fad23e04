//! The requests that are let in: keys, and the host that they mean.

use std::net::{IpAddr, SocketAddr};

use axum::http::header::{AUTHORIZATION, HOST};
use axum::http::{HeaderMap, Version};

use crate::api::{ApiError, ErrorKind, quoted};

/// The keys of clients, as hashes: a comparison takes the same time whatever is wrong with a key. No keys let
/// everybody in.
#[derive(Clone, Debug, Default)]
pub struct ApiKeys(Vec<blake3::Hash>);

impl ApiKeys {
    /// The keys of a list.
    pub fn new(keys: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        Self(keys.into_iter().map(|key| blake3::hash(key.as_ref().as_bytes())).collect())
    }

    /// Returns whether there are several, whose owners may not trust each other.
    pub(crate) fn are_many(&self) -> bool {
        self.0.len() > 1
    }

    /// Checks the key of a request: `Authorization: Bearer KEY`, or `x-api-key`. Returns its hash, if there are keys.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<Option<blake3::Hash>, ApiError> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let bearer = headers.get(AUTHORIZATION).and_then(|value| {
            let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim().as_bytes())
        });
        let given = bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()));
        let hash = blake3::hash(given.unwrap_or_default());
        // All are compared, each in constant time.
        let is_known = self.0.iter().fold(false, |is_known, key| is_known | (*key == hash));
        if is_known && given.is_some() {
            return Ok(Some(hash));
        }
        let message =
            if given.is_some() { "the API key is wrong" } else { "an API key is needed: Authorization: Bearer KEY" };
        Err(ApiError::new(ErrorKind::WrongKey, message))
    }
}

/// The hosts that requests may mean. A page of another site can send requests to an address of this machine under its
/// own name (DNS rebinding); such a name is refused.
#[derive(Clone, Debug)]
pub(crate) struct Hosts {
    /// Names besides those of this machine.
    allowed: Vec<String>,
    /// True if every name is right: the server is meant for other machines, which have their own names for it.
    allows_all: bool,
}

impl Hosts {
    pub(crate) fn new(allowed: &[String], address: SocketAddr) -> Self {
        let allows_all = allowed.is_empty() && !address.ip().is_loopback();
        Self { allowed: allowed.iter().map(|name| name.to_ascii_lowercase()).collect(), allows_all }
    }

    /// Checks the host of a request.
    pub(crate) fn check(&self, version: Version, headers: &HeaderMap) -> Result<(), ApiError> {
        let mut hosts = headers.get_all(HOST).iter();
        let (first, second) = (hosts.next(), hosts.next());
        let Some(host) = first else {
            let is_old = version == Version::HTTP_10 || version == Version::HTTP_09;
            let missing = ApiError::new(ErrorKind::Invalid, "the Host header is missing");
            return if is_old { Ok(()) } else { Err(missing) };
        };
        if second.is_some() {
            return Err(ApiError::new(ErrorKind::Invalid, "the Host header comes twice"));
        }
        let host = String::from_utf8_lossy(host.as_bytes()).to_ascii_lowercase();
        let name = without_port(&host);
        if self.allows_all || is_own(name) || self.allowed.iter().any(|allowed| allowed == name) {
            return Ok(());
        }
        let message =
            format!("the Host header {} is not one of this server: allow it by --allowed-host", quoted(&host));
        Err(ApiError::new(ErrorKind::WrongHost, message))
    }
}

/// Returns whether a name always means this machine, or is no name but an address.
fn is_own(name: &str) -> bool {
    let address = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(name);
    name == "localhost" || name.ends_with(".localhost") || address.parse::<IpAddr>().is_ok()
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.is_empty() => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn h14_keys_are_compared_as_hashes_and_none_is_none() {
        let keys = ApiKeys::new(["one", "two"]);
        assert!(keys.check(&headers("authorization", "Bearer one")).unwrap().is_some());
        assert!(keys.check(&headers("authorization", "bearer two")).is_ok());
        assert!(keys.check(&headers("x-api-key", "two")).is_ok());
        for wrong in ["Bearer three", "Bearer ", "Bearer", "Basic one", "one", "Bearer onetwo"] {
            assert_eq!(keys.check(&headers("authorization", wrong)).unwrap_err().kind, ErrorKind::WrongKey, "{wrong}");
        }
        assert_eq!(keys.check(&HeaderMap::new()).unwrap_err().kind.status(), 401);
        assert_eq!(ApiKeys::default().check(&HeaderMap::new()), Ok(None));
        assert!(!format!("{keys:?}").contains("one"));
    }

    #[test]
    fn h16_names_of_other_sites_are_refused_on_this_machines_own_address() {
        let own = Hosts::new(&[], "127.0.0.1:80".parse().unwrap());
        let check = |hosts: &Hosts, host: &str| hosts.check(Version::HTTP_11, &headers("host", host)).is_ok();
        for host in ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:80", "a.localhost", "192.168.0.1"] {
            assert!(check(&own, host), "{host}");
        }
        for host in ["evil.com", "evil.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "", ":80", "[::1"] {
            assert!(!check(&own, host), "{host}");
        }
        let named = Hosts::new(&["Models.example".to_owned()], "0.0.0.0:80".parse().unwrap());
        assert!(check(&named, "models.example:80") && !check(&named, "evil.com"));
        assert!(check(&Hosts::new(&[], "0.0.0.0:80".parse().unwrap()), "service.cluster"));
        assert!(own.check(Version::HTTP_11, &HeaderMap::new()).is_err());
        assert!(own.check(Version::HTTP_10, &HeaderMap::new()).is_ok());
    }
}
