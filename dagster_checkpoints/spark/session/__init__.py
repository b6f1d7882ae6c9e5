"""The Spark session, its Java, and the proof that every executor shares the work directory."""
