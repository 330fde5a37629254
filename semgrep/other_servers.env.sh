API_KEY=change-me-in-production
RUST_LOG=warn
