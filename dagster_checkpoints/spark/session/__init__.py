"""The Spark session, its Java, and the check that every executor shares the work directory."""
