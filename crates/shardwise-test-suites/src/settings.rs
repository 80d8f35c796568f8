//! Settings of test runs from environment variables (listed in CONTRIBUTING.md under "Longer runs").

use std::str::FromStr;

/// The value of the environment variable `name`, or `default` if it is not set.
///
/// # Panics
/// If the variable is set to text that does not parse.
pub fn env_or<T: FromStr>(name: &str, default: T) -> T {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a valid value")),
        Err(_) => default,
    }
}
