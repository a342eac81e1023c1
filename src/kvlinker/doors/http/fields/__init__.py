"""Fields of requests and answers that several routes share, in addition to those in
``kvlinker.doors.http.fields.bodies``."""
