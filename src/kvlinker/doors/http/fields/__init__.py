"""Fields of requests and answers that several routes share, beside those in
``kvlinker.doors.http.fields.bodies``."""
